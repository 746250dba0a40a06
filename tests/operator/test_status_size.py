"""The status of the largest model fits into what the API server stores, whatever schedulers and kubelets say."""

import json

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model

WORDS = "0/4096 nodes are available: " + "1 Insufficient nvidia.com/gpu, node(s) had untolerated taint; " * 40
LIMIT_BYTES = 1536 * 1024


@pytest.mark.parametrize(("replicas", "stages"), [(2, 2), (64, 16), pytest.param(64, 64, marks=pytest.mark.thorough)])
def test_a_status_of_pending_pods_can_be_stored(replicas: int, stages: int) -> None:
    cluster = PlannedCluster(tiny_model(replicas=replicas, parallelism={"pipeline": stages}))
    cluster.step()
    cluster.step()
    words = {"reason": "Unschedulable", "message": WORDS, "lastTransitionTime": cluster.now.isoformat()}
    for pod in cluster.pods.values():
        pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", **words}]
    cluster.step()
    size = len(json.dumps(cluster.status.to_manifest()))
    rows = [row for group in cluster.status.groups for row in group.stages]
    assert len(rows) == replicas * stages
    assert size < 0.9 * LIMIT_BYTES, f"{size} bytes, {size / len(rows):.0f} for each stage"
    assert {row.reason for row in rows} == {"Unschedulable"}
    assert rows[0].message == WORDS[:1000]
