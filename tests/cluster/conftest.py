"""One cluster for all tests of this folder, and a namespace for each test."""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.control_plane import ControlPlane
from cluster.instant_kubelet import InstantKubelet, instant_kubelet
from cluster.model_in_cluster import ModelInCluster, small_model
from cluster.operator_process import OperatorProcess
from cluster.simulated_nodes import SimulatedNodes, running_nodes
from cluster.under_test import Cluster, foreign_cluster, own_cluster, own_cluster_with_gangs, uses_foreign_cluster
from oracles.tiny_models import write_tiny_llama
from processes.gateway_process import GatewayProcess, running_gateway
from processes.repository_files import ROOT

CRD_FILE = ROOT / "charts" / "stageline" / "files" / "crds" / "stageline.dev_pipelinemodels.yaml"
NODE_NAMES = ("node-a", "node-b", "node-c")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, with the CRD applied and served."""
    directory = tmp_path_factory.mktemp("plane")
    with foreign_cluster(directory) if uses_foreign_cluster() else own_cluster(directory) as found:
        serve_pipeline_models(found)
        yield found


def serve_pipeline_models(cluster: Cluster) -> None:
    """Apply the CRD, and wait until it is served."""
    cluster.kubectl_ok("apply", "--server-side", "--force-conflicts", "-f", str(CRD_FILE))
    cluster.kubectl_ok("wait", "--for=condition=Established", "--timeout=120s", "-f", str(CRD_FILE))
    # Established is what the API server writes down just before it serves the resource.
    listed = ("get", "plm", "--all-namespaces")
    wait_until("PipelineModels are served", lambda: cluster.kubectl(*listed).returncode == 0, 120)


@pytest.fixture(scope="module")
def gang_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose own scheduler places whole groups; not the same as `cluster`, since few have this on."""
    if uses_foreign_cluster():
        pytest.skip("needs a control plane with features that are off by default")
    with own_cluster_with_gangs(tmp_path_factory.mktemp("gang-plane")) as found:
        serve_pipeline_models(found)
        yield found


@pytest.fixture(scope="session")
def control_plane(cluster: Cluster) -> ControlPlane:
    """The processes of our own control plane."""
    if cluster.plane is None:
        pytest.skip("stops the API server, or runs it with other options: only a control plane of our own may be")
    return cluster.plane


@pytest.fixture(scope="session")
def all_nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNodes]:
    if cluster.plane is None:
        pytest.skip("runs stages as processes on nodes of this machine, whose loopback addresses nobody else can reach")
    with running_nodes(cluster, tmp_path_factory.mktemp("nodes"), NODE_NAMES) as found:
        yield found


@pytest.fixture
def nodes(all_nodes: SimulatedNodes) -> SimulatedNodes:
    """Our nodes, all of them ready, whatever the test before did to them."""
    all_nodes.recover()
    return all_nodes


@pytest.fixture(scope="module")
def operator_process(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """One for each file: it acts in all namespaces, and other files count what operators of their own do."""
    process = OperatorProcess(cluster, tmp_path_factory.mktemp("operator"))
    try:
        yield process
    finally:
        process.end()
        process.forget()


@pytest.fixture
def operator(operator_process: OperatorProcess) -> OperatorProcess:
    """The operator, running, whatever the test before did to it."""
    operator_process.recover()
    return operator_process


@pytest.fixture(scope="module")
def shared_gateway(
    cluster: Cluster, shared_namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway of the namespace that the tests of one file share."""
    directory = tmp_path_factory.mktemp("gateway")
    with running_gateway(cluster, shared_namespace, directory) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def shared_spec() -> dict[str, Any]:
    """What the model that a file's tests share differs by from `small_model`; a file overrides it."""
    return {}


@pytest.fixture(scope="module")
def shared_model(
    cluster: Cluster,
    all_nodes: SimulatedNodes,
    operator_process: OperatorProcess,
    shared_namespace: str,
    shared_spec: dict[str, Any],
    tiny_llama_dir: Path,
) -> Iterator[ModelInCluster]:
    """A model of two stages that the tests of one file share."""
    operator_process.recover()
    found = small_model(cluster, shared_namespace, tiny_llama_dir, all_nodes, **shared_spec)
    found.apply()
    yield found
    cluster.api.delete("PipelineModel", found.name, shared_namespace)


@pytest.fixture
def model(shared_model: ModelInCluster, nodes: SimulatedNodes, operator: OperatorProcess) -> ModelInCluster:
    """The shared model, ready, with every node and the operator at work."""
    assert nodes.by_name
    assert operator.pid
    shared_model.until_ready()
    return shared_model


@pytest.fixture(scope="module")
def kubelet(cluster: Cluster) -> Iterator[InstantKubelet]:
    """A node whose pods are ready at once and run nothing."""
    with cluster.connect() as client, instant_kubelet(client) as found:
        yield found


@contextmanager
def new_namespace(cluster: Cluster, words: str) -> Iterator[str]:
    short = re.sub(r"[^a-z0-9]+", "-", words.removeprefix("test_").lower()).strip("-")[:40].strip("-")
    name = f"{short}-{uuid.uuid4().hex[:6]}"
    cluster.kubectl_ok("create", "namespace", name)
    # No pod can be made before it is there.
    cluster.kubectl_ok("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=120s")
    yield name
    cluster.kubectl_ok("delete", "namespace", name, "--wait=false")


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace that lives as long as the test; deleted without waiting."""
    with new_namespace(cluster, request.node.name) as name:
        yield name


@pytest.fixture
def other_namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """One more."""
    with new_namespace(cluster, request.node.name) as name:
        yield name


@pytest.fixture(scope="module")
def shared_namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace that the tests of one file share."""
    with new_namespace(cluster, request.node.name.rpartition("/")[2].removesuffix(".py")) as name:
        yield name


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return ROOT
