"""Pod Security admission takes stage pods under its restricted profile, and refuses what the docs say leaves it."""

from typing import Any

import pytest

from cluster.api import wait_until
from cluster.manifest_samples import SOURCE
from cluster.under_test import Cluster
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects import GroupIncarnation, build_stage_pod

OVERLAID: dict[str, Any] = {
    "serviceAccountName": "default",
    "env": [
        {"name": "LICENSE", "valueFrom": {"secretKeyRef": {"name": "license", "key": "text", "optional": True}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
    ],
    "podTemplate": {
        "metadata": {"labels": {"example.com/team": "a"}, "annotations": {"example.com/group": "$(MODEL)-$(GROUP)"}},
        "spec": {
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"stageline.dev/model": "$(MODEL)"}},
                }
            ],
            "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
            "volumes": [{"name": "scratch", "emptyDir": {"medium": "Memory"}}],
            "initContainers": [
                {
                    "name": "watcher",
                    "image": "watcher:1",
                    "restartPolicy": "Always",
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
            "containers": [
                {
                    "name": "stage",
                    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                    "resources": {"claims": [{"name": "gpu"}]},
                }
            ],
        },
    },
}
"""Of Kubernetes' pod API what people lay over the pods, each part checked by the API server's own validation."""
RESTRICTED: dict[str, dict[str, Any]] = {
    "downloaded": {"model": {"source": SOURCE}},
    "claim": {"model": {"source": "pvc://models/tiny", "cache": {"claimName": "cache"}}},
    "private registry": {"template": {"imagePullSecrets": [{"name": "ours"}]}},
    "devices": {"template": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "network": {"interface": "eth1"}},
    "ranks": {"parallelism": {"pipeline": 2, "tensor": 2}},
    "ranks on devices": {"engine": {"device": "cuda"}, "parallelism": {"pipeline": 2, "tensor": 2}},
    "overlay": {"template": OVERLAID},
}
LEAVING: dict[str, tuple[dict[str, Any], str]] = {
    "cache of the node": ({"model": {"source": SOURCE, "cache": {"hostPath": "/var/cache/stageline"}}}, "hostPath"),
    "directory of the node": ({"model": {"source": "file:///models/tiny"}}, "hostPath"),
    "rdma": ({"network": {"rdmaResource": "rdma/hca"}}, "IPC_LOCK"),
    "network of the node": ({"template": {"podTemplate": {"spec": {"hostNetwork": True}}}}, "hostNetwork=true"),
    "root": ({"template": {"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}}, "runAsUser=0"),
}


def pods_of(spec: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    manifest = {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": "tiny", "namespace": namespace},
        "spec": {"model": {"source": SOURCE}, "parallelism": {"pipeline": 2}} | spec,
    }
    model = PipelineModel.model_validate(manifest)
    return [build_stage_pod(model, GroupIncarnation(0, 1), stage, "r1", "stageline:test") for stage in range(2)]


@pytest.fixture
def restricted(cluster: Cluster, namespace: str) -> str:
    cluster.kubectl_ok("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    spec, _ = LEAVING["root"]
    root = pods_of(spec, namespace)[0]

    def _is_enforced() -> bool:
        return cluster.api.create("Pod", root, namespace, dry_run=True).status_code == 403

    # Admission reads labels from a watch; before it has come there, everything would be taken.
    wait_until("the profile is enforced", _is_enforced, 120)
    return namespace


@pytest.mark.parametrize("spec", RESTRICTED.values(), ids=RESTRICTED.keys())
def test_the_restricted_profile_is_met(cluster: Cluster, restricted: str, spec: dict[str, Any]) -> None:
    for pod in pods_of(spec, restricted):
        response = cluster.api.create("Pod", pod, restricted, dry_run=True)
        assert response.status_code == 201, response.text


@pytest.mark.parametrize(("spec", "words"), LEAVING.values(), ids=LEAVING.keys())
def test_what_leaves_it_is_refused_by_name(cluster: Cluster, restricted: str, spec: dict[str, Any], words: str) -> None:
    response = cluster.api.create("Pod", pods_of(spec, restricted)[0], restricted, dry_run=True)
    assert response.status_code == 403, response.text
    assert words in response.json()["message"], response.text
