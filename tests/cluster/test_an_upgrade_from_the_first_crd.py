"""Models stored under the first CRD are the same ones under today's, and under the first again after a rollback.

The control plane is the file's own, because the CRD is everybody's. The operator is today's throughout: what changes
with a CRD is what the API server keeps and fills in of a model, and no group may be replaced because of that.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet, instant_kubelet
from cluster.operator_under_test import OperatorReplica, operator_replica
from cluster.under_test import Cluster, own_cluster, to_json, uses_foreign_cluster
from processes.repository_files import ROOT
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import revision_of

CRD_FILE = ROOT / "operator" / "stageline_api" / "crds" / "stageline.dev_pipelinemodels.yaml"
FIRST_CRD = Path(__file__).parent / "recorded" / "first_crd.yaml"
MODELS = "models"
SOON_SECONDS = 180.0
AS_SHORT_AS_CAN_BE: dict[str, Any] = {"model": {"source": "file:///models/tiny"}}
ALL_OF_THE_TIME: dict[str, Any] = {
    "model": {"source": "hf://org/name", "revision": "main", "servedName": "long-ago", "cache": {"sizeLimit": "1Gi"}},
    "replicas": 2,
    "parallelism": {"pipeline": 2},
    "stages": [{"layers": "0-1"}, {"layers": "2-3"}],
    "engine": {"dtype": "float32", "maxNumSeqs": 4, "maxModelLen": 256, "maxNumBatchedTokens": 64, "graphs": "off"},
    "rollout": {"maxSurge": 0, "maxUnavailable": 1},
    "restart": {"maxRestarts": 3},
    "timeouts": {"drainSeconds": 5},
    "network": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
}
WRITTEN = {"short": AS_SHORT_AS_CAN_BE, "long": ALL_OF_THE_TIME}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane with the first CRD alone."""
    if uses_foreign_cluster():
        pytest.skip("puts an older CRD in place of the cluster's")
    with own_cluster(tmp_path_factory.mktemp("first-plane")) as found:
        found.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": MODELS}})
        put_crd(found, FIRST_CRD)
        yield found


@pytest.fixture(scope="module")
def kubelet(cluster: Cluster) -> Iterator[InstantKubelet]:
    with cluster.connect() as client, instant_kubelet(client) as found:
        yield found


@pytest.fixture(scope="module")
def operator(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorReplica]:
    log = tmp_path_factory.mktemp("operator") / "log"
    with operator_replica(cluster.kubeconfig, log, "--namespace", MODELS, "--no-leader-elect") as found:
        yield found


def put_crd(cluster: Cluster, file: Path) -> None:
    """As Helm would: what the older one had is gone with it. Waits until the API server checks objects by it."""
    cluster.kubectl_ok("apply", "--server-side", "--force-conflicts", "-f", str(file))
    cluster.kubectl_ok("wait", "--for=condition=Established", "--timeout=120s", "-f", str(file))
    is_new = file == CRD_FILE
    probe = manifest("probe", AS_SHORT_AS_CAN_BE | {"template": {"serviceAccountName": "any"}})

    def is_served() -> bool:
        found = cluster.api.create("PipelineModel", probe, MODELS, dry_run=True)
        return found.is_success if is_new else found.status_code == 400 and "serviceAccountName" in found.text

    wait_until(f"{file.name} is what objects are checked by", is_served, SOON_SECONDS)


def manifest(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    head = {"apiVersion": "stageline.dev/v1alpha1", "kind": "PipelineModel"}
    return {**head, "metadata": {"name": name, "namespace": MODELS}, "spec": spec}


def model(cluster: Cluster, name: str) -> dict[str, Any]:
    found = cluster.api.get("PipelineModel", name, MODELS)
    assert found is not None
    return found


def pod_uids(cluster: Cluster) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.api.list("Pod", MODELS)}


def wait_ready(cluster: Cluster, operator: OperatorReplica) -> None:
    """Both models are as they should be, and were looked at since `seen` changed."""

    def is_ready() -> bool:
        statuses = [model(cluster, name).get("status", {}) for name in WRITTEN]
        conditions = [{each["type"]: each["status"] for each in status.get("conditions", [])} for status in statuses]
        return all(each.get("Ready") == "True" for each in conditions)

    def shown() -> str:
        return to_json([model(cluster, name) for name in WRITTEN]) + operator.log()

    wait_until("both are ready", is_ready, SOON_SECONDS, shown)


def look_again(cluster: Cluster, operator: OperatorReplica, why: str) -> None:
    """Make the operator plan each model anew, and wait until it has."""

    def passes() -> float:
        return sum(operator.samples("stageline_operator_reconcile_duration_seconds_count").values())

    before = passes()
    for name in WRITTEN:
        cluster.kubectl_ok("annotate", "plm", name, "-n", MODELS, "--overwrite", f"seen={why}")
    wait_until("it has looked", lambda: passes() >= before + len(WRITTEN), SOON_SECONDS, operator.log)
    wait_ready(cluster, operator)


def test_models_and_groups_outlive_the_upgrade_and_the_rollback(
    cluster: Cluster, kubelet: InstantKubelet, operator: OperatorReplica
) -> None:
    template = {"template": {"nodeSelector": kubelet.template["nodeSelector"], "tolerations": [{"operator": "Exists"}]}}
    written = {name: spec | template for name, spec in WRITTEN.items()}
    for name, spec in written.items():
        cluster.apply(manifest(name, spec))
    wait_ready(cluster, operator)
    pods = pod_uids(cluster)
    stored = {name: model(cluster, name) for name in WRITTEN}

    put_crd(cluster, CRD_FILE)
    look_again(cluster, operator, "by today's CRD")
    assert pod_uids(cluster) == pods, operator.log()
    for name, spec in written.items():
        cluster.apply(manifest(name, spec))  # what a person keeps in git is still no change
        found = model(cluster, name)
        assert found["metadata"]["generation"] == stored[name]["metadata"]["generation"]
        assert found["status"]["updateRevision"] == revision_of(PipelineModel.model_validate(manifest(name, spec)))
    crd = cluster.kubectl_ok("get", "crd", "pipelinemodels.stageline.dev", "-o", "json")
    assert yaml.safe_load(crd)["status"]["storedVersions"] == ["v1alpha1"]

    put_crd(cluster, FIRST_CRD)
    look_again(cluster, operator, "by the first CRD again")
    assert pod_uids(cluster) == pods, operator.log()
    for name in WRITTEN:
        assert model(cluster, name)["spec"] == stored[name]["spec"]
