"""hf:// sources, by the real Hub client against a server on loopback."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from oracles.sharded_models import shard_four_layers
from oracles.tiny_models import write_tiny_llama
from processes.fake_hub import COMMIT, FakeHub, running_hub
from stageline_api.failures import ExitCode
from stageline_api.resource.serving.model_source import parse_source
from stageline_runtime.prepare.cache import MANIFEST_NAME, read_manifest
from stageline_runtime.prepare.command import prepare as prepare_command
from stageline_runtime.prepare.errors import BadConfigError, PrepareError
from stageline_runtime.prepare.progress import PlainReporter
from stageline_runtime.prepare.sources import prepare_source

REPO = "tiny/llama"
TOKEN = "hf_not_a_real_token_but_secret"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_llama(tmp_path_factory.mktemp("repository"), num_layers=2)
    (directory / "README.md").write_text("not needed")
    (directory / "consolidated.safetensors").write_bytes(b"the same weights again")
    (directory / "onnx").mkdir()
    (directory / "onnx" / "config.json").write_text("{}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    # An index that outlived its shards.
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    return directory


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub(REPO, repository)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub(fake) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield fake


def prepare(cache: Path, source: str = f"hf://{REPO}") -> tuple[Path, str]:
    told = io.StringIO()
    return prepare_source(parse_source(source), cache, PlainReporter(told)), told.getvalue()


def no_entry(cache: Path) -> bool:
    return all(path.name.endswith((".lock", ".use")) for path in cache.iterdir())


def test_a_repository_is_fetched_once_and_only_what_serving_needs(
    hub: FakeHub, repository: Path, tmp_path: Path
) -> None:
    model_dir, told = prepare(tmp_path)
    names = {str(path.relative_to(model_dir)) for path in model_dir.rglob("*") if path.is_file()}
    assert names == {
        "additional_chat_templates/tool_use.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        MANIFEST_NAME,
    }
    for name in names - {MANIFEST_NAME}:
        assert (model_dir / name).read_bytes() == (repository / name).read_bytes(), name
    manifest = read_manifest(model_dir)
    assert manifest is not None
    assert manifest.resolved == COMMIT
    assert hub.downloads()[0] == "config.json", "the config is judged before weights are fetched"
    assert "Downloading tiny/llama: done" in told
    count = len(hub.requests)
    again, told = prepare(tmp_path)
    assert again == model_dir
    assert len(hub.requests) == count, hub.requests[count:]
    assert "in the cache" in told


def test_the_token_is_sent_and_never_shown(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN + "\n")
    model_dir, told = prepare(tmp_path)
    assert {authorization for _, _, authorization in hub.requests} == {f"Bearer {TOKEN}"}
    assert TOKEN not in told
    assert not [path for path in model_dir.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


@pytest.mark.parametrize("given", [None, "hf_wrong_token"], ids=["no-token", "wrong-token"])
def test_a_private_repository_says_what_token_was_used(
    given: str | None, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = TOKEN
    if given is not None:
        monkeypatch.setenv("HF_TOKEN", given)
    with pytest.raises(PrepareError) as refusal:
        prepare(tmp_path)
    used = "no token (HF_TOKEN" if given is None else "used the token in HF_TOKEN"
    assert used in refusal.value.message
    assert "hf_" not in refusal.value.message.replace("HF_TOKEN", "")
    assert no_entry(tmp_path)


def test_a_gated_repository_says_to_accept_its_terms(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated = True
    with pytest.raises(PrepareError, match="tiny/llama is gated: accept its terms") as refusal:
        prepare(tmp_path)
    assert refusal.value.exit_code == ExitCode.MODEL_LOAD, "the terms may be accepted before the next try"


def test_an_unknown_repository_is_named(hub: FakeHub, tmp_path: Path) -> None:
    assert hub.repo == REPO
    with pytest.raises(BadConfigError, match="tiny/other does not exist on the Hub or is private"):
        prepare(tmp_path, "hf://tiny/other")


def test_a_revision_is_asked_for_and_an_unknown_one_named(hub: FakeHub, tmp_path: Path) -> None:
    hub.branch = "v2"
    model_dir, _ = prepare(tmp_path, f"hf://{REPO}@v2")
    manifest = read_manifest(model_dir)
    assert manifest is not None
    assert manifest.source == f"hf://{REPO}@v2"
    with pytest.raises(BadConfigError, match="has no branch, tag or commit 'v3'"):
        prepare(tmp_path, f"hf://{REPO}@v3")


def test_a_connection_that_breaks_midway_is_resumed(hub: FakeHub, repository: Path, tmp_path: Path) -> None:
    hub.break_once = "model.safetensors"
    model_dir, _ = prepare(tmp_path)
    assert hub.break_once is None, "the connection never broke"
    assert hub.downloads().count("model.safetensors") == 2
    assert (model_dir / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()


def test_weights_that_differ_from_their_promised_hash_are_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.corrupt = "model.safetensors"
    with pytest.raises(PrepareError, match="does not match the SHA-256"):
        prepare(tmp_path)
    assert no_entry(tmp_path)


def test_a_file_outside_lfs_that_differs_from_its_promised_hash_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    """Of the promised size: its hash alone tells."""
    hub.corrupt = "tokenizer.json"
    with pytest.raises(PrepareError, match=r"tokenizer.json of .* does not match the hash"):
        prepare(tmp_path)
    assert no_entry(tmp_path)


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, repository: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (other / name).write_bytes((repository / name).read_bytes())
    (other / "config.json").write_text('{"model_type": "mamba"}')
    hub.directory = other
    with pytest.raises(BadConfigError, match="model_type 'mamba' is not supported"):
        prepare(tmp_path / "cache")
    assert hub.downloads() == ["config.json"]


def test_a_family_that_only_vllm_knows_is_fetched_whole_for_vllm_alone(hub: FakeHub, tmp_path: Path) -> None:
    hub.directory = shard_four_layers(write_tiny_llama(tmp_path / "other"))
    config = json.loads((hub.directory / "config.json").read_text())
    (hub.directory / "config.json").write_text(json.dumps(config | {"model_type": "tomorrow"}))
    asked = ["--source", f"hf://{REPO}", "--cache-dir", str(tmp_path / "cache")]
    refused = CliRunner().invoke(prepare_command, asked)
    assert "model_type 'tomorrow' is not supported" in str(refused.exception)
    assert hub.downloads() == ["config.json"]
    fetched = CliRunner().invoke(prepare_command, [*asked, "--engine", "vllm"])
    assert fetched.exit_code == 0, (fetched.output, fetched.exception)
    entry = Path(fetched.stdout.strip())
    for file in hub.directory.iterdir():
        assert (entry / file.name).read_bytes() == file.read_bytes(), file.name
    refused = CliRunner().invoke(prepare_command, asked)
    assert "model_type 'tomorrow' is not supported" in str(refused.exception), "what the cache has is judged too"


def test_an_unreachable_hub_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PrepareError, match="the Hub can't be reached") as refusal:
        prepare(tmp_path)
    assert refusal.value.exit_code == ExitCode.MODEL_LOAD
