"""Which machine or cluster a command asks, and what it says when there is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.readable_kube_api import readable_kube_api
from processes.free_ports import free_port
from stageline_api import env
from stageline_cli.main import run
from stageline_cli.on_call.sources.cluster_source import served_namespaces

WITHOUT_KUBERNETES = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("kubernetes", "kopf", "torch", "fastapi", "msgspec"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from stageline_cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster and no `up` of the person who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--local", "--namespace", "x"], "give one or the other"),
        (["--state-dir", "/tmp", "--cluster"], "give one or the other"),
        (["-n", "x", "-A"], "exclude each other"),
        (["--reach", "teleport"], "'teleport' is not one of 'proxy', 'direct'"),
    ],
)
@pytest.mark.parametrize("command", ["status", "top", "debug-bundle"])
def test_contradictions_are_refused(
    command: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, *words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_with_nothing_up_and_no_cluster_there_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status"]) == 0
    assert "there is no PipelineModel" in capsys.readouterr().out
    assert run(["status", "--exit-code"]) == 4
    assert run(["status", "tiny"]) == 1
    assert "stageline up on this machine: there is no model 'tiny'" in capsys.readouterr().err
    assert run(["debug-bundle"]) == 1


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--kubeconfig", str(tmp_path / "none")]) == 2
    assert f"can't log in to a cluster by {tmp_path / 'none'}" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with readable_kube_api() as api:
        api.url = f"http://127.0.0.1:{free_port()}"
        file = api.write_kubeconfig(tmp_path / "kubeconfig", "lab")
        assert run(["status", "--kubeconfig", str(file)]) == 1
    error = capsys.readouterr().err
    assert "cluster lab, namespace lab: PipelineModels can't be read: no answer:" in error
    assert "Connection refused" in error


def test_a_cluster_without_the_resource_asks_for_the_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with readable_kube_api() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig", "lab")))
        assert run(["status"]) == 1
        assert "is the chart installed?" in capsys.readouterr().err
        api.objects["/apis/stageline.dev/v1alpha1/pipelinemodels"] = []
        assert run(["status", "-A", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["where"] == "cluster lab, all namespaces"


def test_a_machine_without_a_kubernetes_client_can_ask_itself_and_is_told_how_to_ask_a_cluster(tmp_path: Path) -> None:
    def _run(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", WITHOUT_KUBERNETES, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    done = _run("status", "--local")
    assert (done.returncode, done.stderr) == (0, "")
    done = _run("status", "--cluster")
    assert done.returncode == 1
    assert "status needs kubernetes, which is not installed: pip install 'stageline[cluster]'" in done.stderr
    done = _run("debug-bundle", "--local", "--output", str(tmp_path / "x.tar.gz"))
    assert "there is no model" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "variable", "namespaces"),
    [
        (["--kubernetes", "--namespace=models"], "", {"models"}),
        (["--kubernetes", "--namespace=a,b", "--namespace=c"], "d", {"a", "b", "c"}),
        (["--kubernetes"], "a b,c", {"a", "b", "c"}),
        (["--kubernetes"], "", {"system"}),
    ],
)
def test_a_gateway_serves_the_namespaces_of_its_arguments(
    arguments: list[str], variable: str, namespaces: set[str]
) -> None:
    variables = [{"name": env.GATEWAY_NAMESPACES, "value": variable}, {"name": "POD_IP", "valueFrom": {}}]
    container = {"name": "gateway", "args": arguments, "env": variables}
    pod = {"metadata": {"namespace": "system"}, "spec": {"containers": [container]}}
    assert served_namespaces(pod) == namespaces
