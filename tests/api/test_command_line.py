"""`stageline` as a person runs it: help without heavy imports, exit statuses, and never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from cluster.manifest_samples import manifest
from stageline_api.errors import UserError
from stageline_api.manifests.crd import render_crd
from stageline_cli import main as command_line
from stageline_cli.lazy_group import LazyCommand, LazyGroup

LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def _stageline(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != command_line.DEBUG_ENV}
    return subprocess.run(
        [sys.executable, "-m", "stageline_cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )


def _write(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(document))
    return path


def test_help_lists_every_command_without_importing_torch_or_any_command() -> None:
    program = (
        "import sys; from stageline_cli.main import run; run(['--help']);"
        "heavy = {'torch', 'fastapi', 'pydantic', 'stageline_runtime', 'stageline_gateway', 'stageline_local'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert done.stderr == "[]\n"
    for name, row in command_line.COMMANDS.items():
        assert any(line.split() == [name, *row.help.split()] for line in done.stdout.splitlines()), done.stdout


def test_version_is_the_distributions_own() -> None:
    done = _stageline("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("stageline 0.")


def test_crd_prints_the_definition() -> None:
    assert _stageline("crd").stdout == render_crd()


def test_validate_says_ok_for_each_model(tmp_path: Path) -> None:
    file = _write(tmp_path / "good.yaml", manifest("good"))
    done = _stageline("validate", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: good ok\n", "")


def test_validate_prints_one_line_for_each_problem_and_exits_2(tmp_path: Path) -> None:
    good = _write(tmp_path / "good.yaml", manifest("good"))
    bad = _write(tmp_path / "bad.yaml", manifest("bad", parallelism={"pipeline": 0, "tensor": 9}))
    done = _stageline("validate", str(bad), str(good), str(tmp_path / "absent.yaml"))
    assert done.returncode == 2, done
    assert done.stdout == f"{good}: good ok\n"
    assert done.stderr.splitlines() == [
        f"{bad}: spec.parallelism.pipeline: 0 is not allowed: must be at least 1",
        f"{bad}: spec.parallelism.tensor: 9 is not allowed: must be at most 8",
        f"{tmp_path}/absent.yaml: can't be read: No such file or directory",
    ]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (LLAMA_CONFIG, "spec.parallelism.pipeline: 5 is not allowed: must be at most 4, the model's number of layers"),
        (LLAMA_CONFIG | {"num_hidden_layers": 5}, None),
        (LLAMA_CONFIG | {"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, mistral,"),
    ],
    ids=["too-few-layers", "enough-layers", "unsupported"],
)
def test_validate_checks_the_cut_where_the_models_config_is_at_hand(
    tmp_path: Path, config: dict[str, Any], line: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    document = manifest(model={"source": f"file://{tmp_path}"}, parallelism={"pipeline": 5})
    done = _stageline("validate", str(_write(tmp_path / "m.yaml", document)))
    assert done.returncode == (0 if line is None else 2), done
    assert (line or "") in done.stderr
    assert len(done.stderr.splitlines()) == (0 if line is None else 1)


@pytest.mark.parametrize("arguments", [["nope"], ["validate"], ["--nope"]], ids=" ".join)
def test_a_mistyped_command_exits_2_without_a_traceback(arguments: list[str]) -> None:
    done = _stageline(*arguments)
    assert done.returncode == 2
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


def _group_raising(error: Exception, extra: str | None = None) -> LazyGroup:
    @click.command()
    def fail() -> None:
        raise error

    group = LazyGroup(name="stageline", commands_table={"fail": LazyCommand(target="x:y", help="Fails.", extra=extra)})
    group._load = lambda name, row: fail  # type: ignore[method-assign]  # noqa: ARG005
    return group


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (UserError("port 8080 is in use", 64), 64, "stageline: port 8080 is in use"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch.nn"),
            1,
            "stageline: fail needs torch, which is not installed: pip install 'stageline[runtime]'",
        ),
        (
            ValueError("two\nlines"),
            1,
            "stageline: ValueError: two lines (unexpected; run with STAGELINE_DEBUG=1 for the traceback)",
        ),
        (KeyboardInterrupt(), 130, "stageline: interrupted"),
    ],
    ids=["user-error", "missing-dependency", "unexpected", "interrupted"],
)
def test_a_failure_is_one_line_and_an_exit_status(
    error: Exception, exit_code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(command_line.DEBUG_ENV, raising=False)
    monkeypatch.setattr(command_line, "cli", _group_raising(error, extra="runtime"))
    assert command_line.run(["fail"]) == exit_code
    assert capsys.readouterr().err.strip() == line


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(command_line.DEBUG_ENV, "1")
    monkeypatch.setattr(command_line, "cli", _group_raising(ValueError("why")))
    assert command_line.run(["fail"]) == 1
    assert "Traceback" in capsys.readouterr().err
