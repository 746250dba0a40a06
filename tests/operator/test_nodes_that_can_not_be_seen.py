"""An operator without rights on nodes tells a lost one from its pods, and ends in the same cause."""

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api.failures import FailureClass, TerminationMessage
from stageline_operator.planner.group.cause import SETTLE_SECONDS

PEER_LOST = TerminationMessage(failure_class=FailureClass.PEER_LOST, stage=0, peer=1, detail="stage 1 is silent")


def ready_cluster() -> PlannedCluster:
    """Each stage on a node of its own, as kubelets show them."""
    cluster = PlannedCluster(tiny_model())
    cluster.sees_nodes = False
    cluster.settle()
    for stage in (0, 1):
        cluster.pod(stage)["spec"]["nodeName"] = f"node-{stage}"
        show(cluster, stage, ready=True)
    cluster.settle()
    assert cluster.phase() == "Ready"
    return cluster


def show(cluster: PlannedCluster, stage: int, ready: bool, containers_ready: bool = True) -> None:
    since = cluster.now.isoformat()
    told = {"Ready": ready, "ContainersReady": containers_ready}
    cluster.pod(stage)["status"]["conditions"] = [
        {"type": kind, "status": str(holds), "lastTransitionTime": since} for kind, holds in told.items()
    ]


def test_a_pod_that_only_the_node_controller_speaks_of_is_lost_after_a_while() -> None:
    cluster = ready_cluster()
    show(cluster, 1, ready=False)
    planned = cluster.step()
    assert cluster.phase() == "Starting"
    assert planned.requeue_after_seconds == 10, "nobody else would say when the time is over"
    cluster.advance(10)
    planned = cluster.step()
    assert {each.name: each.grace_seconds for each in planned.delete} == {"tiny-0-1-0": 3.0, "tiny-0-1-1": 0.0}
    (failure,) = cluster.status.last_failures
    assert (failure.failure_class, failure.stage, failure.message) == ("NodeLost", 1, "node node-1 is lost")


def test_a_kubelet_that_comes_back_in_time_keeps_its_group() -> None:
    cluster = ready_cluster()
    show(cluster, 1, ready=False)
    cluster.step()
    cluster.advance(9)
    show(cluster, 1, ready=True)
    cluster.settle()
    cluster.advance(60)
    cluster.settle()
    assert (cluster.phase(), cluster.status.last_failures) == ("Ready", ())


def test_a_stage_that_is_not_ready_for_its_own_reasons_has_a_kubelet() -> None:
    cluster = ready_cluster()
    show(cluster, 1, ready=False, containers_ready=False)
    cluster.settle()
    cluster.advance(600)
    cluster.settle()
    assert cluster.status.last_failures == ()


def test_the_peer_that_noticed_first_is_not_the_cause_and_the_silent_pod_holds_nothing_up() -> None:
    cluster = ready_cluster()
    cluster.end_container(0, 71, PEER_LOST)
    cluster.holds_deletions = True
    cluster.advance(SETTLE_SECONDS)
    cluster.settle()
    assert cluster.status.last_failures[0].failure_class == "PeerLost"
    del cluster.objects[("Pod", "tiny-0-1-0")]
    show(cluster, 1, ready=False)
    cluster.settle()
    cluster.advance(10)
    cluster.settle()
    assert "tiny-0-1-1" not in cluster.pods
    (failure,) = cluster.status.last_failures
    assert (failure.failure_class, failure.stage) == ("NodeLost", 1)
    assert failure.message == "node node-1 is lost; stage 0 noticed: stage 1 is silent"


def test_a_pod_that_should_be_gone_for_a_minute_is_waited_for_no_longer() -> None:
    """It never was ready, so nobody could take that from it; and its own node may be the only one that knew it."""
    cluster = PlannedCluster(tiny_model())
    cluster.sees_nodes = False
    cluster.settle()
    cluster.holds_deletions = True
    cluster.end_container(0, 1, "broken")
    cluster.settle()
    assert (cluster.phase(), sorted(cluster.pods)) == ("Terminating", ["tiny-0-1-0", "tiny-0-1-1"])
    cluster.pod(1)["metadata"]["deletionTimestamp"] = cluster.now.isoformat()
    del cluster.objects[("Pod", "tiny-0-1-0")]
    cluster.advance(59)
    cluster.settle()
    assert cluster.phase() == "Terminating"
    cluster.advance(1)
    cluster.settle()
    assert "tiny-0-1-1" not in cluster.pods
    assert (cluster.phase(), cluster.status.last_failures[0].failure_class) == ("Starting", "Internal")


def test_where_nodes_are_seen_only_they_say_that_one_is_lost() -> None:
    cluster = ready_cluster()
    cluster.sees_nodes = True
    show(cluster, 1, ready=False)
    cluster.settle()
    cluster.advance(600)
    cluster.settle()
    assert cluster.status.last_failures == ()


def four_stages_of_which_three_are_silent() -> PlannedCluster:
    """Each on a node of its own, silent for ten minutes."""
    cluster = PlannedCluster(tiny_model(parallelism={"pipeline": 4}))
    cluster.sees_nodes = False
    cluster.settle()
    for stage in range(4):
        cluster.pod(stage)["spec"]["nodeName"] = f"node-{stage}"
        show(cluster, stage, ready=True)
    cluster.settle()
    for stage in range(3):
        show(cluster, stage, ready=False)
    cluster.settle()
    cluster.advance(600)
    return cluster


def test_nodes_whose_pods_the_control_plane_evicts_are_lost_however_many() -> None:
    """It evicts nothing while it takes their silence for a fault of its own."""
    cluster = four_stages_of_which_three_are_silent()
    for stage in range(3):
        evicted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        cluster.pod(stage)["status"]["conditions"].append(evicted)
        cluster.pod(stage)["metadata"]["deletionTimestamp"] = cluster.now.isoformat()
    planned = cluster.step()
    assert {each.name: each.grace_seconds for each in planned.delete} == {
        "tiny-0-1-0": 0.0, "tiny-0-1-1": 0.0, "tiny-0-1-2": 0.0, "tiny-0-1-3": 3.0
    }  # fmt: skip
    assert [each.failure_class for each in cluster.status.last_failures] == ["NodeLost"]


def test_when_most_of_its_nodes_fall_silent_at_once_a_model_is_left_alone() -> None:
    """Four stages on four nodes: three silent ones at once are an outage, of which only the pods can tell."""
    cluster = four_stages_of_which_three_are_silent()
    planned = cluster.step()
    assert (len(cluster.pods), cluster.status.last_failures, planned.delete) == (4, (), ())
    assert planned.requeue_after_seconds == 5
    assert cluster.condition("Ready") == ("False", "NodeUnreachable")
    assert "3 of 4 nodes can't be reached" in cluster.condition_message("Ready")
