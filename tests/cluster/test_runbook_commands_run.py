"""The commands of the runbooks, typed on a real control plane where the chart is installed and models are served.

Commands that only look go to a model that serves or, where it takes an alert's cause to see something, to one that has
it. Those that change something come after them, each with its effect. What can't be typed here, and what rightly prints
nothing, is listed in `runbook_commands`.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import helm_python
import pytest
import trustme
import yaml

from boards.runbook_commands import changes, run_in_tests
from boards.runbook_reader import GATEWAY_NAME, RunbookReader
from boards.typed_commands import Terminal, Typed
from cluster.api import wait_until
from cluster.control_plane import running_control_plane
from cluster.control_plane_binary import control_plane_binaries
from cluster.installed_chart import node_values, until_available
from cluster.instant_kubelet import InstantKubelet
from cluster.model_in_cluster import ModelInCluster, small_model
from cluster.rendered_chart import CHART, NAMESPACE, RELEASE
from cluster.served_kubelet import ADDRESS_OPTION, served_kubelet
from cluster.simulated_nodes import SimulatedNodes, running_nodes
from cluster.under_test import Cluster, cluster_of, uses_foreign_cluster

MODELS: Final = "models"
SOON_SECONDS: Final = 120.0
AT_ONCE: Final = 4
"""Commands typed at the same time: half of what they take is waiting between two readings."""
LOOKING: Final = [command for command in run_in_tests() if not changes(command)]
RESTART: Final = 'kubectl -n $NAMESPACE annotate plm/$MODEL --overwrite stageline.dev/restart="$(date)"'
SUSPEND: Final = """kubectl -n $NAMESPACE patch plm $MODEL --type=merge -p '{"spec":{"suspend":true}}'"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane of this file's own: Helm must find no CRD and no other operator."""
    if uses_foreign_cluster():
        pytest.skip("installs images that only our own nodes have")
    directory = tmp_path_factory.mktemp("runbook-plane")
    with (
        running_control_plane(directory, control_plane_binaries(), ADDRESS_OPTION) as plane,
        cluster_of(plane) as found,
    ):
        for name in (NAMESPACE, MODELS):
            found.kubectl_ok("create", "namespace", name)
        yield found


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNodes]:
    """Two that run processes and give out their logs."""
    assert cluster.plane is not None
    with running_nodes(cluster, tmp_path_factory.mktemp("runbook-nodes"), ("node-a", "node-b")) as found:
        found.recover()
        with served_kubelet(cluster, cluster.plane, found):
            yield found


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def release(cluster: Cluster, nodes: SimulatedNodes, authority: trustme.CA) -> str:
    """The chart, with the Secrets that docs/install.md has one make first, under the names that the pages use."""
    issued = authority.issue_cert(GATEWAY_NAME)
    certificate = b"".join(each.bytes() for each in issued.cert_chain_pems).decode()
    secrets = {
        "gateway-keys": {"keys.yaml": yaml.safe_dump({"keys": [{"name": "test", "sha256": "0" * 64}]})},
        "gateway-tls": {"tls.crt": certificate, "tls.key": issued.private_key_pem.bytes().decode()},
    }
    for name, data in secrets.items():
        metadata = {"name": name, "namespace": NAMESPACE}
        cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data})
    values = node_values(MODELS)
    values["gateway"]["tls"] = {"secretName": "gateway-tls"}
    with helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as helm:
        helm.install(CHART, RELEASE, values)
    until_available(cluster, nodes)
    return RELEASE


@pytest.fixture(scope="module")
def serving(cluster: Cluster, nodes: SimulatedNodes, release: str, tiny_llama_dir: Path) -> ModelInCluster:
    """A model whose stages are processes; it loads while others fail."""
    assert release
    model = small_model(cluster, MODELS, tiny_llama_dir, nodes, "serving")
    model.apply()
    return model


@pytest.fixture(scope="module")
def given_up(serving: ModelInCluster, kubelet: InstantKubelet, tiny_llama_dir: Path) -> ModelInCluster:
    """A model whose only group has failed once too often."""
    model = small_model(serving.cluster, MODELS, tiny_llama_dir, None, "given-up", template=kubelet.template)
    model.apply(restart={"maxRestarts": 0})
    model.until_ready()
    kubelet.end_container(model.pod(1), 1, "the last words")
    model.until("its group is given up", lambda _: model.condition("Degraded").get("status") == "True", SOON_SECONDS)
    return model


@pytest.fixture(scope="module")
def stuck(serving: ModelInCluster, tiny_llama_dir: Path) -> ModelInCluster:
    """A model that finds no node, for longer than it may take."""
    nowhere = {"nodeSelector": {"example.org/nowhere": "yes"}}
    model = small_model(serving.cluster, MODELS, tiny_llama_dir, None, "stuck", template=nowhere)
    model.apply(rollout={"progressDeadlineSeconds": 1})
    late = "ProgressDeadlineExceeded"
    model.until("it is late", lambda _: model.condition("Progressing").get("reason") == late, SOON_SECONDS)
    return model


@pytest.fixture(scope="module")
def changed(serving: ModelInCluster, kubelet: InstantKubelet, tiny_llama_dir: Path) -> ModelInCluster:
    """A model for the commands that change something."""
    model = small_model(serving.cluster, MODELS, tiny_llama_dir, None, "changed", template=kubelet.template)
    model.apply()
    model.until_ready()
    return model


@pytest.fixture(scope="module")
def reader(
    serving: ModelInCluster,
    given_up: ModelInCluster,
    stuck: ModelInCluster,
    kubelet: InstantKubelet,
    authority: trustme.CA,
    tmp_path_factory: pytest.TempPathFactory,
) -> RunbookReader:
    """Somebody on call, with every model as the pages take it to be."""
    concerned = {r'lastFailures|"Degraded"|type=Warning': given_up, '"Progressing"': stuck}
    terminal = Terminal(serving.cluster, tmp_path_factory.mktemp("home"))
    found = RunbookReader(terminal, serving, concerned, kubelet.name)
    found.prepare(authority)
    return found


@pytest.fixture(scope="module")
def answers(reader: RunbookReader) -> Iterator[dict[str, "Future[Typed]"]]:
    """To every command that only looks; the longest are typed first."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        slowest_first = sorted(LOOKING, key=lambda command: not command.startswith("stageline"))
        yield {command: pool.submit(reader.look, command) for command in slowest_first if is_installed(command)}


def is_installed(command: str) -> bool:
    """Whether a machine that tests has its program; kubectl and stageline are the tests' own."""
    program = command.split()[0]
    return program not in ("curl", "openssl") or shutil.which(program) is not None


@pytest.mark.parametrize("command", LOOKING)
def test_a_command_that_only_looks_shows_what_it_is_for(command: str, answers: dict[str, "Future[Typed]"]) -> None:
    if command not in answers:
        pytest.skip(f"{command.split()[0]} is not installed")
    assert answers[command].result().status == 0


def is_made_anew(model: ModelInCluster, before: dict[str, Any]) -> None:
    model.until_incarnation(before["groups"][0]["incarnation"])


def has_two_groups(model: ModelInCluster, _: dict[str, Any]) -> None:
    model.until_ready(groups=2)


def has_no_pods(model: ModelInCluster, _: dict[str, Any]) -> None:
    wait_until("the pods are gone", lambda: not model.pods(), SOON_SECONDS, model.everything)
    model.until("the status says so too", lambda status: not status["groups"], SOON_SECONDS)


EFFECTS: Final[dict[str, Callable[[ModelInCluster, dict[str, Any]], None]]] = {
    "kubectl -n $NAMESPACE delete pod $POD": is_made_anew,
    "kubectl -n $NAMESPACE scale plm/$MODEL --replicas=N": has_two_groups,
    SUSPEND: has_no_pods,
}
"""In order; each waits for what a command does to a model, whose status of before is given."""
NODE_COMMANDS: Final = ("kubectl cordon NODE", "kubectl delete node NODE")


def test_every_command_that_changes_something_is_checked_below() -> None:
    assert sorted(filter(changes, run_in_tests())) == sorted([RESTART, *EFFECTS, *NODE_COMMANDS])


def typed_and_taken(reader: RunbookReader, command: str, model: ModelInCluster) -> None:
    answer = reader.type(command, model)
    assert answer.status == 0, str(answer)


def wait_for_all(answers: dict[str, "Future[Typed]"]) -> None:
    """What is changed has been looked at."""
    for answer in answers.values():
        answer.exception()


def test_a_group_that_was_given_up_comes_back_by_the_annotation(
    reader: RunbookReader, answers: dict[str, "Future[Typed]"], given_up: ModelInCluster
) -> None:
    wait_for_all(answers)
    typed_and_taken(reader, RESTART, given_up)
    given_up.until_ready()


@pytest.mark.parametrize("command", EFFECTS)
def test_a_command_that_changes_a_model_has_its_effect(
    reader: RunbookReader, changed: ModelInCluster, command: str
) -> None:
    before = changed.status()
    typed_and_taken(reader, command, changed)
    EFFECTS[command](changed, before)


def test_a_node_is_cordoned_and_let_go(reader: RunbookReader, changed: ModelInCluster, kubelet: InstantKubelet) -> None:
    cordon, delete = NODE_COMMANDS
    typed_and_taken(reader, cordon, changed)
    node = changed.cluster.api.get("Node", kubelet.name)
    assert node is not None
    assert node["spec"]["unschedulable"] is True
    typed_and_taken(reader, delete, changed)
    assert changed.cluster.api.get("Node", kubelet.name) is None
