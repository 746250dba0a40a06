"""`stageline plan` as a person types it: a table or JSON, warnings with the missing bytes, and never a traceback."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.manifest_samples import manifest
from processes.command_here import stageline_here
from stageline_runtime.prepare.cache import prepared_model_dir

EXAMPLES = Path(__file__).parents[3] / "examples"
LARGE = (
    str(EXAMPLES / "llama_70b_eight_stages.yaml"),
    "--model-config",
    str(EXAMPLES / "configs" / "llama-70b-class.json"),
)
SMALL_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return stageline_here("plan", *arguments)


def write_small(tmp_path: Path, config: object = SMALL_CONFIG, **spec: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(manifest("small", model={"source": f"file://{tmp_path}"}, **spec)))
    return path


def test_a_70b_class_config_is_planned_without_weights() -> None:
    done = plan(*LARGE, "--devices", "l4-24gb", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert [stage["layers"] for stage in document["stages"]] == [
        "0-9",
        "10-19",
        "20-29",
        "30-39",
        "40-49",
        "50-59",
        "60-70",
        "71-79",
    ]
    assert sum(stage["weight_bytes"] for stage in document["stages"]) == 2 * 70_553_706_496
    assert document["admitted_sequences"] == 64
    assert document["warnings"] == []
    assert any("predictions" in note for note in document["notes"])


def test_the_8b_example_fits_a_24_gb_device_and_the_note_names_the_context() -> None:
    """As docs/quickstart-gpu.md says: 43 sequences of the 1,024 tokens that are planned for, not of `maxModelLen`."""
    example, config = EXAMPLES / "gpu" / "qwen3_8b.yaml", EXAMPLES / "configs" / "qwen3-8b.json"
    done = plan(str(example), "--model-config", str(config), "--devices", "l4-24gb", "--json", "--strict")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["context_tokens"] == 1024
    assert "The KV cache holds 43 sequences of 1024 tokens, not 64." in document["notes"]


def test_the_table_shows_every_stage_and_what_is_an_estimate() -> None:
    done = plan(*LARGE, "--devices", "h200-141gb", "--batch", "256", "--context", "2000")
    assert done.returncode == 0, done
    rows = [line.split() for line in done.stdout.splitlines() if "h200-141gb" in line]
    assert [row[row.index("h200-141gb") + 2] for row in rows] == (
        ["0-9", "10-19", "20-29", "30-39", "40-49", "50-59", "60-70", "71-79"]
    )
    assert "256 sequences (32 rows per step) at 2000 tokens of context" in done.stdout
    assert "note: Weights and KV capacity follow from the config." in done.stdout
    assert "warning" not in done.stdout


@pytest.mark.parametrize(("options", "exit_code"), [((), 0), (("--strict",), 1)], ids=["shown", "strict"])
def test_a_stage_that_cant_hold_its_part_is_named_with_what_is_missing(
    tmp_path: Path, options: tuple[str, ...], exit_code: int
) -> None:
    devices = tmp_path / "devices.yaml"
    devices.write_text("stages: [" + "{preset: l4-24gb}, " * 7 + "{preset: l4-24gb, memoryBytes: 1Gi}]")
    done = plan(*LARGE, "--devices", str(devices), *options)
    assert done.returncode == exit_code, done
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: stage 7 can't hold its part: ")
    assert "GiB missing, with 993.3 MiB usable" in warnings[0]
    assert "predicted: nothing, as it can't be served" in done.stdout


def test_a_plan_that_fits_is_no_failure_when_strict() -> None:
    assert plan(*LARGE, "--devices", "l4-24gb", "--strict").returncode == 0


def test_explicit_layers_are_shown_as_written(tmp_path: Path) -> None:
    file = write_small(tmp_path, parallelism={"pipeline": 2}, stages=[{"layers": "0-0"}, {"layers": "1-3"}])
    document = json.loads(plan(str(file), "--json", "--devices", "cpu-core").stdout)
    assert document["is_explicit_cut"]
    assert [stage["layers"] for stage in document["stages"]] == ["0-0", "1-3"]


@pytest.mark.parametrize(
    ("engine", "options", "limits"),
    [
        pytest.param({}, (), (16, 512), id="this-machine"),
        pytest.param({}, ("--devices", "l4-24gb"), (256, 8192), id="devices"),
        pytest.param({"device": "cpu"}, ("--devices", "cpu-core"), (16, 512), id="cpu"),
        pytest.param({"maxNumSeqs": 4}, ("--devices", "l4-24gb", "--batch", "7"), (7, 8192), id="given"),
    ],
)
def test_limits_are_those_of_the_device(
    tmp_path: Path, engine: dict[str, Any], options: tuple[str, ...], limits: tuple[int, int]
) -> None:
    file = str(write_small(tmp_path, engine=engine))
    document = json.loads(plan(file, "--json", *options).stdout)
    assert (document["num_sequences"], document["max_step_tokens"]) == limits
    assert f"limits: {limits[0]} sequences at once, {limits[1]} tokens a step" in plan(file, *options).stdout


def test_by_default_the_stages_share_this_machine(tmp_path: Path) -> None:
    done = plan(str(write_small(tmp_path, parallelism={"pipeline": 2})), "--json")
    assert done.returncode == 0, done
    document = json.loads(done.stdout)
    assert {stage["device"] for stage in document["stages"]} == {"this machine"}
    assert len({stage["usable_bytes"] for stage in document["stages"]}) == 1
    assert any("rough guesses" in note for note in document["notes"])


def test_a_prepared_model_is_found_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = "pypi://some-model==1.0/model.gguf"
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(manifest("cached", model={"source": source})))
    refused = plan(str(path))
    assert refused.returncode == 2
    assert f"the config.json of {source} is not on this machine: give one with --model-config" in refused.stderr
    fetch = f"`stageline prepare --source {source} --cache-dir {tmp_path / 'stageline'}"
    assert fetch in refused.stderr

    cache = Path(refused.stderr.rpartition("--cache-dir ")[2].partition("`")[0])
    entry = prepared_model_dir(source, cache)
    entry.mkdir(parents=True)
    (entry / "config.json").write_text(json.dumps(SMALL_CONFIG))
    assert plan(str(path)).returncode == 0


@pytest.mark.parametrize(
    ("config", "spec", "options", "message"),
    [
        (SMALL_CONFIG, {"parallelism": {"pipeline": 5}}, (), "spec.parallelism.pipeline: 5 is not allowed"),
        (
            SMALL_CONFIG,
            {"engine": {"maxModelLen": 300}},
            (),
            "spec.engine.maxModelLen: 300 is not allowed: must be at most 256, the model's context length",
        ),
        (SMALL_CONFIG, {}, ("--context", "257"), "--context: 257 is not allowed: must be at most 256"),
        (SMALL_CONFIG, {}, ("--devices", "h300"), '--devices: "h300" is neither a file nor one of the presets'),
        (SMALL_CONFIG, {}, ("--model-config", "/nowhere"), "--model-config: /nowhere is neither"),
        (SMALL_CONFIG | {"model_type": "mamba"}, {}, (), "model_type 'mamba' is not supported"),
        (SMALL_CONFIG | {"intermediate_size": 0}, {}, (), "intermediate_size is 0; it must be at least 1"),
        ([1], {}, (), "config.json: must hold a JSON object"),
    ],
    ids=["pipeline", "max-model-len", "context", "devices", "no-config", "model-type", "size", "not-an-object"],
)
def test_bad_input_is_one_sentence_and_status_2(
    tmp_path: Path, config: object, spec: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    done = plan(str(write_small(tmp_path, config, **spec)), *options)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_planning_never_loads_torch() -> None:
    program = (
        "import sys; from stageline_cli.main import run; status = run(['plan', *sys.argv[1:]]);"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, *LARGE, "--devices", "l4-24gb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_draft_model_takes_its_memory_from_the_last_stage(tmp_path: Path, device: str) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    speculative = {"method": "draft", "draft": {"source": f"file://{draft}"}}
    given = {"engine": {"speculative": speculative, "device": device}, "parallelism": {"pipeline": 2}}
    hardware = () if device == "cpu" else ("--devices", "l4-24gb")
    file = write_small(tmp_path, **given)
    missing = plan(str(file), *hardware)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert f"spec.engine.speculative.draft.source: there is no config.json of file://{draft}" in missing.stderr
    (draft / "config.json").write_text(json.dumps(SMALL_CONFIG | {"num_hidden_layers": 2}))
    with_draft = json.loads(plan(str(file), "--json", *hardware).stdout)["stages"]
    without = write_small(tmp_path, parallelism={"pipeline": 2}, engine={"device": device})
    plain = json.loads(plan(str(without), "--json", *hardware).stdout)["stages"]
    first, last = (
        stage["weight_bytes"] - other["weight_bytes"] for stage, other in zip(with_draft, plain, strict=True)
    )
    assert first == 0
    assert last > 0
