"""What an eviction may take: one group at a time, whatever else is under way, and never nothing for ever."""

from typing import Any

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model


def ready_cluster(**spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(**spec))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    return cluster


def allowed(cluster: PlannedCluster) -> int:
    """Evictions of ready pods that the budget allows, as the API server counts them."""
    ready = [pod for pod in cluster.pods.values() if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]
    return len(ready) - int(cluster.objects[("PodDisruptionBudget", "tiny")]["spec"]["minAvailable"])


def is_ready(pod: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"]["conditions"])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_of_ready_groups_one_pod_may_go(replicas: int) -> None:
    assert allowed(ready_cluster(replicas=replicas)) == 1


def test_while_a_lost_group_comes_back_no_other_may_go() -> None:
    cluster = ready_cluster(replicas=3)
    cluster.end_container(0, 137)
    cluster.step()
    assert cluster.phase() == "Terminating"
    assert allowed(cluster) <= 0
    cluster.settle()
    cluster.advance(2)
    cluster.settle()
    assert (cluster.phase(), allowed(cluster)) == ("Starting", 0)
    cluster.make_ready()
    cluster.settle()
    assert allowed(cluster) == 1


def test_a_group_that_is_left_down_blocks_no_drain() -> None:
    cluster = ready_cluster(replicas=3, restart={"maxRestarts": 0})
    cluster.end_container(0, 137)
    cluster.settle()
    assert (cluster.phase(), allowed(cluster)) == ("Failed", 1)


def test_a_group_that_does_not_come_back_in_time_blocks_no_drain() -> None:
    cluster = ready_cluster(replicas=3, rollout={"progressDeadlineSeconds": 100})
    cluster.end_container(0, 137)
    cluster.settle()
    cluster.advance(99)
    cluster.settle()
    assert (cluster.phase(), allowed(cluster)) == ("Starting", 0)
    cluster.advance(2)
    cluster.settle()
    assert cluster.condition("Progressing") == ("False", "ProgressDeadlineExceeded")
    assert allowed(cluster) == 1


def test_a_surge_that_starts_and_one_that_is_ready_change_nothing() -> None:
    """Also when the new revision has more stages."""
    cluster = ready_cluster(replicas=2)
    cluster.model = tiny_model(2, replicas=2, parallelism={"pipeline": 5})
    seen = []
    for _ in range(8):
        cluster.settle()
        seen.append(allowed(cluster))
        cluster.make_ready()
    cluster.settle()
    seen.append(allowed(cluster))
    assert set(seen) == {1}, seen
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")


def test_ready_pods_of_a_group_that_does_not_serve_protect_no_others_loss() -> None:
    cluster = ready_cluster(replicas=2)
    cluster.pod(0)["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    cluster.settle()
    assert (cluster.phase(), allowed(cluster)) == ("Starting", 0)
