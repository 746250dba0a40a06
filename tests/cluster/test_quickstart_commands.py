"""The cluster commands of the README and the quick starts, typed in the order of the pages on a real control plane.

`helm` is a library here, so its commands are parsed and their values are added to those that process nodes need. The
image is this installation, and the example's model is in the cache that all tests share.
"""

import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import helm_python
import pytest
import yaml

from boards.typed_commands import Terminal
from cluster.api import wait_until
from cluster.control_plane import running_control_plane
from cluster.control_plane_binary import control_plane_binaries
from cluster.installed_chart import AVAILABLE_SECONDS, everything, node_values, pods_of, until_available
from cluster.rendered_chart import CHART, NAMESPACE, RELEASE
from cluster.served_kubelet import ADDRESS_OPTION, served_kubelet
from cluster.simulated_nodes import SimulatedNodes, running_nodes
from cluster.under_test import Cluster, cluster_of, uses_foreign_cluster
from processes.page_commands import PAGES, Place, commands_at, values_set
from processes.repository_files import ROOT
from stageline_api import labels

pytestmark = pytest.mark.timeout(1800)
TYPED: Final = list(dict.fromkeys(command for page in PAGES for command in commands_at(Place.CLUSTER, page)))
"""Each once, in the order of the pages."""
GPU_EXAMPLE: Final = "examples/gpu/qwen3_8b.yaml"


def typed(*beginning: str, naming: str = "") -> list[str]:
    """Those of the commands that begin so and name something; a missing one is a fault of the pages."""
    found = [each for each in TYPED if each.startswith(" ".join(beginning)) and naming in each]
    assert found, f"no page has a command {' '.join(beginning)} {naming}: {TYPED}"
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane of this file's own: Helm must find no CRD and no other operator."""
    if uses_foreign_cluster():
        pytest.skip("installs images that only our own nodes have")
    directory = tmp_path_factory.mktemp("quickstart-plane")
    with (
        running_control_plane(directory, control_plane_binaries(), ADDRESS_OPTION) as plane,
        cluster_of(plane) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def own_nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNodes]:
    assert cluster.plane is not None
    with running_nodes(cluster, tmp_path_factory.mktemp("quickstart-nodes"), ("node-a", "node-b")) as found:
        found.recover()
        with served_kubelet(cluster, cluster.plane, found):
            yield found


@pytest.fixture(scope="module")
def checkout(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as a reader has it, but that the example's model is in a cache already."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples", root / "examples")
    file = root / "examples" / "smollm2.yaml"
    manifest = yaml.safe_load(file.read_text(encoding="utf-8"))
    manifest["spec"]["model"]["cache"] = {"hostPath": str(smollm2_dir.parent)}
    file.write_text(yaml.safe_dump(manifest), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster, checkout: Path) -> Callable[[str], str]:
    """Type a command of kubectl in the checkout; it has to succeed."""

    def _typed(command: str) -> str:
        words = shlex.split(command)
        assert words[0] == "kubectl", command
        program = [cluster.kubectl_command, "--kubeconfig", str(cluster.kubeconfig)]
        done = subprocess.run(
            [*program, *words[1:]], cwd=checkout, capture_output=True, text=True, timeout=700, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return _typed


def values_of(command: str) -> dict[str, Any]:
    """The command's own values, over those of process nodes; a gateway without keys, of the release's namespace."""
    values = node_values(NAMESPACE)
    del values["gateway"]["keys"], values["gateway"]["namespace"]
    for name, value in values_set(shlex.split(command)).items():
        if name != "images":  # a registry that no test has
            values[name] = value
    return values


def test_helm_install_of_each_page_runs_operator_and_gateway(cluster: Cluster, own_nodes: SimulatedNodes) -> None:
    installs = typed("helm install")
    for command in installs:
        words = shlex.split(command)
        assert words[2:4] == [RELEASE, "charts/stageline"], command
        assert (words[words.index("-n") + 1], "--create-namespace" in words) == (NAMESPACE, True), command
    with helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as helm:
        cluster.kubectl_ok("create", "namespace", NAMESPACE)
        release = helm.install(CHART, RELEASE, values_of(installs[0]))
        assert release["status"] == "deployed", release
    until_available(cluster, own_nodes)


def test_the_example_becomes_ready(own_nodes: SimulatedNodes, kubectl: Callable[[str], str]) -> None:
    assert own_nodes
    (apply,) = typed("kubectl apply", naming="smollm2")
    (wait,) = typed("kubectl wait", naming="smollm2")
    assert "created" in kubectl(apply)
    assert "condition met" in kubectl(wait)


def test_the_port_is_forwarded(cluster: Cluster, own_nodes: SimulatedNodes, tmp_path: Path) -> None:
    """As far as kubectl goes: process nodes carry nothing through it."""
    assert own_nodes
    (forward,) = typed("kubectl port-forward")
    assert "8080:80" in forward
    with_free_port = forward.replace("8080:80", ":80")
    shown = Terminal(cluster, tmp_path / "home").type_and_interrupt(with_free_port, {})
    assert "Forwarding from 127.0.0.1" in shown.shown, str(shown)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt-get install curl")
def test_curl_gets_the_answer_from_the_gateway(cluster: Cluster, own_nodes: SimulatedNodes) -> None:
    (question,) = typed("curl", naming='"smollm2"')
    (pod,) = pods_of(cluster, "gateway")
    line = question.replace("127.0.0.1:8080", f"{pod['status']['podIP']}:8080").replace(
        "curl ", "curl --noproxy '*' ", 1
    )

    def _answer() -> str:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=240, check=False)
        return done.stdout if "Paris" in done.stdout else ""

    wait_until("an answer", _answer, AVAILABLE_SECONDS, lambda: everything(cluster, own_nodes))


def test_the_gpu_example_gets_a_claim_and_asks_for_a_gpu(
    cluster: Cluster, own_nodes: SimulatedNodes, kubectl: Callable[[str], str]
) -> None:
    """After the page's upgrade. Nothing is computed: these nodes count GPUs that they don't have."""
    (upgrade,) = typed("helm upgrade")
    (apply,) = typed("kubectl apply", naming=GPU_EXAMPLE)
    runtime_class = values_of(upgrade)["gpu"]["runtimeClassName"]
    metadata = {"metadata": {"name": runtime_class}, "handler": "runc"}
    cluster.apply({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", **metadata})
    with helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as helm:
        helm.upgrade(CHART, RELEASE, values_of(upgrade))
    until_available(cluster, own_nodes)
    assert "created" in kubectl(apply)
    selected = {labels.MODEL: "qwen3-8b"}

    def _made() -> list[dict[str, Any]]:
        return [
            each for kind in ("PersistentVolumeClaim", "Pod") for each in cluster.api.list(kind, NAMESPACE, selected)
        ]

    made = wait_until("a claim and a pod", lambda: _made() if len(_made()) == 2 else [], AVAILABLE_SECONDS)
    claim, pod = made
    assert claim["spec"]["resources"]["requests"]["storage"] == "40Gi"
    (mounted,) = [each["persistentVolumeClaim"] for each in pod["spec"]["volumes"] if "persistentVolumeClaim" in each]
    assert mounted["claimName"] == claim["metadata"]["name"]
    (stage,) = [each for each in pod["spec"]["containers"] if each["name"] == "stage"]
    assert stage["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["spec"]["runtimeClassName"] == runtime_class


def test_models_and_release_are_removed(
    cluster: Cluster, own_nodes: SimulatedNodes, kubectl: Callable[[str], str]
) -> None:
    (delete,) = typed("kubectl delete", naming="smollm2")
    (uninstall,) = typed("helm uninstall")
    assert "deleted" in kubectl(delete)
    assert shlex.split(uninstall)[2:] == [RELEASE, "-n", NAMESPACE]
    with helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as helm:
        helm.uninstall(RELEASE)
    wait_until(
        "operator and gateway are gone",
        lambda: not pods_of(cluster, "operator") and not pods_of(cluster, "gateway"),
        AVAILABLE_SECONDS,
        lambda: everything(cluster, own_nodes),
    )
    assert "qwen3-8b" in cluster.kubectl_ok("get", "plm", "-n", NAMESPACE)


def test_every_command_was_typed() -> None:
    """A command of another kind needs a test above."""
    verbs = ("apply", "wait", "port-forward", "delete")
    kinds = ("helm install", "helm upgrade", "helm uninstall", "curl", *(f"kubectl {verb}" for verb in verbs))
    assert [each for each in TYPED if not each.startswith(kinds)] == []
