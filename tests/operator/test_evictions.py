"""What others do to a group, by drains, preemption or a reclaimed node, uses up none of its restarts."""

from typing import Any

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model

WHY = ["EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager", "TerminationByKubelet"]


def ready_cluster(**spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(**spec))
    bring_up(cluster)
    return cluster


def bring_up(cluster: PlannedCluster) -> None:
    for _ in range(3):
        cluster.settle()
        cluster.make_ready()
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "AllGroupsReady"), cluster.status


def evict(cluster: PlannedCluster, reason: str) -> None:
    """Somebody deletes the pod of stage 1 and says why."""
    pod = cluster.pod(1)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pod["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": reason, "message": ""})
    cluster.settle()
    del cluster.objects[("Pod", pod["metadata"]["name"])]
    cluster.settle()


@pytest.mark.parametrize("reason", WHY)
def test_evictions_do_not_use_up_restarts(reason: str) -> None:
    cluster = ready_cluster(restart={"maxRestarts": 1})
    for _ in range(20):
        evict(cluster, reason)
        assert cluster.status.last_failures[0].failure_class == "Evicted"
        cluster.advance(72)
        bring_up(cluster)
    assert cluster.status.groups[0].restarts == ()
    assert cluster.status.groups[0].incarnation == 21


def test_an_eviction_of_a_group_without_restarts_left_brings_it_back() -> None:
    cluster = ready_cluster(restart={"maxRestarts": 1})
    cluster.end_container(0, 137)
    cluster.settle()
    cluster.advance(2)
    bring_up(cluster)
    assert len(cluster.status.groups[0].restarts) == 1
    evict(cluster, "EvictionByEvictionAPI")
    cluster.advance(2)
    bring_up(cluster)
    cluster.end_container(0, 137)
    cluster.settle()
    assert cluster.phase() == "Failed", "but its own failures still count"


def test_evictions_in_a_row_of_a_group_that_never_gets_ready_are_waited_out_longer_each_time() -> None:
    cluster = PlannedCluster(tiny_model())
    waits = []
    for _ in range(8):
        cluster.settle()
        evict(cluster, "PreemptionByScheduler")
        until = cluster.status.groups[0].backoff_until
        assert until is not None
        waits.append((until - cluster.now).total_seconds())
        cluster.advance(60)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_pod_that_its_kubelet_evicts_for_its_own_use_of_the_disk_is_a_failure() -> None:
    cluster = ready_cluster(restart={"maxRestarts": 0})
    cluster.pod(1)["status"] |= {"phase": "Failed", "reason": "Evicted", "message": 'Usage of EmptyDir volume "cache"'}
    cluster.settle()
    assert cluster.phase() == "Failed"


def test_a_pod_that_a_full_node_evicts_is_not() -> None:
    cluster = ready_cluster(restart={"maxRestarts": 0})
    disrupted = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "TerminationByKubelet",
        "message": "low on disk",
    }
    cluster.pod(1)["status"] |= {"phase": "Failed", "reason": "Evicted", "conditions": [disrupted]}
    cluster.settle()
    assert cluster.phase() == "BackingOff"
    assert cluster.status.groups[0].restarts == ()
