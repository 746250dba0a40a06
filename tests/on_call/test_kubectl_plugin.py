"""`kubectl stageline` is `stageline`'s on-call commands, and asks a cluster and nothing else."""

import json
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from cluster.readable_kube_api import readable_kube_api
from processes.repository_files import ROOT
from stageline_cli import kubectl_plugin
from stageline_cli.kubectl_plugin import CHANGES, ON_CALL, plugin
from stageline_cli.main import COMMANDS, run


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster and no `up` of the person who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def test_the_wheel_has_a_command_of_the_name_that_kubectl_looks_for() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["kubectl-stageline"].partition(":")
    assert getattr(import_module(module), function) is kubectl_plugin.main


def test_help_names_the_plugin_and_its_commands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"], plugin) == 0
    shown = capsys.readouterr().out
    assert "Usage: kubectl stageline [OPTIONS] COMMAND" in shown
    listed = [line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines() if line[2:3] != " "]
    assert listed == [*ON_CALL, *CHANGES], shown
    assert run(["up"], plugin) == 2
    assert "No such command 'up'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ON_CALL)
def test_it_never_asks_this_machine(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--local"], plugin) == 2
    assert "give one or the other" in " ".join(capsys.readouterr().err.split())
    assert command in COMMANDS
    assert run([command], plugin) == 2
    assert "can't log in to a cluster" in capsys.readouterr().err


@pytest.mark.parametrize("command", CHANGES)
def test_a_change_without_a_cluster_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "smollm2"], plugin) == 2
    assert "can't log in to a cluster" in capsys.readouterr().err
    assert run([command], plugin) == 2
    assert "Missing argument '" in capsys.readouterr().err


def test_it_asks_the_cluster_of_the_current_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with readable_kube_api() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig", "lab")))
        api.objects["/apis/stageline.dev/v1alpha1/pipelinemodels"] = []
        assert run(["status", "-A", "-o", "json"], plugin) == 0
    assert json.loads(capsys.readouterr().out)["where"] == "cluster lab, all namespaces"
