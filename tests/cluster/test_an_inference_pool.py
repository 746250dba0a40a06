"""The chart's InferencePool on an API server that has the kind as it is published, or does not have it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from cluster.rendered_chart import CHART, rendered_objects
from cluster.under_test import Cluster

KIND = "inferencepools.inference.networking.k8s.io"
CRD_FILE = Path(__file__).parent / "recorded" / "inference_pool_crd.yaml"
PICKER = {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}


def values(picker: dict[str, Any]) -> dict[str, Any]:
    """A release of a gateway alone, whose pods nobody runs."""
    return {
        "operator": {"enabled": False},
        "crds": {"install": False},
        "rbac": {"aggregate": False},
        "monitoring": {"dashboards": {"enabled": False}},
        "gateway": {"inferencePool": {"enabled": True, "endpointPickerRef": picker}, "replicas": 0},
    }


@pytest.fixture
def without_the_kind(cluster: Cluster) -> None:
    if cluster.kubectl("get", "crd", KIND).returncode == 0:
        pytest.skip("needs a cluster without the Inference Extension: its kind is made and deleted here")


@pytest.fixture
def with_the_kind(cluster: Cluster, without_the_kind: None) -> Iterator[None]:  # noqa: ARG001 - it comes first
    cluster.kubectl_ok("apply", "--server-side", "-f", str(CRD_FILE))
    try:
        cluster.kubectl_ok("wait", "--for=condition=Established", "--timeout=120s", "crd", KIND)
        yield
    finally:
        cluster.kubectl_ok("delete", "crd", KIND, "--wait=true")


def pools(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    return list(json.loads(cluster.kubectl_ok("get", KIND, "-n", namespace, "-o", "json"))["items"])


@pytest.mark.usefixtures("without_the_kind")
def test_without_the_kind_the_release_is_refused_by_its_name(cluster: Cluster, namespace: str) -> None:
    with (
        helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=namespace) as helm,
        pytest.raises(helm_python.HelmError) as refusal,
    ):
        helm.install(CHART, "pooled", values(PICKER))
    assert 'no matches for kind "InferencePool" in version "inference.networking.k8s.io/v1"' in str(refusal.value)
    assert cluster.api.list("Deployment", namespace) == [], "and nothing of it is made"


@pytest.mark.usefixtures("with_the_kind")
def test_with_the_kind_it_comes_changes_and_goes_with_the_release(cluster: Cluster, namespace: str) -> None:
    with helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=namespace) as helm:
        helm.install(CHART, "pooled", values(PICKER))
        (pool,) = pools(cluster, namespace)
        (deployment,) = cluster.api.list("Deployment", namespace)
        assert pool["spec"]["selector"] == {"matchLabels": deployment["spec"]["selector"]["matchLabels"]}
        assert pool["spec"]["targetPorts"] == [{"number": 8080}]
        assert pool["spec"]["endpointPickerRef"] == {"group": "", "kind": "Service", **PICKER}
        other = {"kind": "Picker", "group": "example.com", "name": "own"}
        helm.upgrade(CHART, "pooled", values(other))
        (pool,) = pools(cluster, namespace)
        assert pool["spec"]["endpointPickerRef"] == {"failureMode": "FailClose", **other}
        helm.upgrade(CHART, "pooled", {**values({}), "gateway": {"replicas": 0}})
        assert pools(cluster, namespace) == []
        helm.uninstall("pooled")


@pytest.mark.usefixtures("with_the_kind")
@pytest.mark.parametrize("picker", [{}, PICKER], ids=["without a picker", "with one"])
def test_the_api_server_takes_it_field_by_field(cluster: Cluster, namespace: str, picker: dict[str, Any]) -> None:
    objects = rendered_objects(values(picker), namespace=namespace)
    pool = yaml.safe_dump(next(each for each in objects if each["kind"] == "InferencePool"))
    cluster.kubectl_ok("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=pool)
