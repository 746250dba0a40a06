"""The digest of a model directory: the same for the same weights wherever they lie, another for any others."""

import shutil
from pathlib import Path

import pytest

from oracles.tiny_models import write_tiny_llama
from stageline_runtime.prepare.cache import MANIFEST_NAME, Manifest
from stageline_runtime.prepare.weights_digest import DIGITS, SAMPLE_BYTES, SAMPLES, weights_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model")


def weights_of(model_dir: Path) -> Path:
    return next(model_dir.glob("*.safetensors"))


def test_a_copy_has_the_same_and_the_tokenizer_is_no_part_of_it(model: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(model, tmp_path / "copied"))
    (copied / "tokenizer.json").write_text("{}")
    assert weights_digest(copied) == weights_digest(model)
    assert len(weights_digest(model)) == DIGITS


def test_other_tensors_sizes_names_or_configs_have_others(model: Path, tmp_path: Path) -> None:
    kinds = {
        "as it is": weights_digest(model),
        "of other numbers": weights_digest(write_tiny_llama(tmp_path / "b", seed=7)),
    }
    (model / "config.json").write_text((model / "config.json").read_text().replace('"rope_theta"', '"rope_thetas"'))
    kinds["another config"] = weights_digest(model)
    weights_of(model).rename(model / "other.safetensors")
    kinds["another name"] = weights_digest(model)
    with (model / "other.safetensors").open("ab") as file:
        file.write(b"\0")
    kinds["longer"] = weights_digest(model)
    assert len(set(kinds.values())) == len(kinds), kinds
    assert all(kinds.values()), kinds


@pytest.mark.parametrize("place", [0, SAMPLE_BYTES - 1, -1, -SAMPLE_BYTES])
def test_a_large_file_is_read_in_samples_from_its_first_byte_to_its_last(tmp_path: Path, place: int) -> None:
    size = 4 * SAMPLES * SAMPLE_BYTES
    digests = set()
    (tmp_path / "config.json").write_text("{}")
    for value in (0, 1):
        content = bytearray(size)
        content[place] = value
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.add(weights_digest(tmp_path))
    assert len(digests) == 2


def test_a_cache_entry_is_named_by_what_it_was_made_from_with_or_without_its_shards(model: Path) -> None:
    def write(resolved: str) -> str:
        manifest = Manifest(source="hf://a/b", resolved=resolved, converter_version=1, files={})
        (model / MANIFEST_NAME).write_text(manifest.model_dump_json())
        return weights_digest(model)

    whole = write("c0ffee")
    weights_of(model).unlink()
    assert write("c0ffee") == whole
    assert write("decaf") != whole


def test_where_nothing_can_be_read_there_is_no_name(tmp_path: Path) -> None:
    assert weights_digest(tmp_path / "missing") == ""
    (tmp_path / "config.json").write_text("{}")
    assert weights_digest(tmp_path) == "", "a config without weights"
