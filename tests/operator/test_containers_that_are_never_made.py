"""A stage whose kubelet can't make its containers says why, and costs its group no restart."""

from datetime import timedelta
from typing import Any

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api.failures import FailureClass, TerminationMessage
from stageline_operator.planner.types import PodTrouble

WORDS = 'MountVolume.SetUp failed for volume "data" : secret "none" not found'


def hang(cluster: PlannedCluster, stage: int, **waiting: str) -> None:
    """The stage has a node, and none of its containers comes into being."""
    pod = cluster.pod(stage)
    pod["spec"]["nodeName"] = "node-1"
    pod["status"] |= {"phase": "Pending", "startTime": cluster.now.isoformat()}
    for each in pod["status"]["containerStatuses"]:
        each["state"] = {"waiting": {"reason": "ContainerCreating"} | waiting}


def started(**spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(**spec))
    cluster.settle()
    return cluster


def peers_give_up(cluster: PlannedCluster) -> None:
    words = TerminationMessage(failure_class=FailureClass.RENDEZVOUS_TIMEOUT, stage=0, detail="stage 1 did not come")
    cluster.end_container(0, 70, words)
    cluster.settle()


def test_what_the_kubelet_says_in_its_events_is_the_stages_reason() -> None:
    cluster = started()
    hang(cluster, 1)
    cluster.settle()
    assert cluster.condition("Ready") == ("False", "GroupsStarting"), "before anybody has said why"
    since = cluster.now - timedelta(seconds=90)
    cluster.troubles["tiny-0-1-1"] = PodTrouble("FailedMount", WORDS, since)
    cluster.settle()
    row = cluster.status.groups[0].stages[1]
    assert (row.reason, row.message, row.since) == ("NotStarted", f"FailedMount: {WORDS}", since)
    assert cluster.condition("Ready") == ("False", "NotStarted")
    assert WORDS in cluster.condition_message("Progressing")


@pytest.mark.parametrize("is_told_by_status", [True, False])
def test_peers_that_give_up_on_it_use_up_no_restart_and_it_is_the_cause(is_told_by_status: bool) -> None:
    cluster = started(restart={"maxRestarts": 0})
    if is_told_by_status:
        hang(cluster, 1, reason="CreateContainerConfigError", message='secret "none" not found')
    else:
        hang(cluster, 1)
        cluster.troubles["tiny-0-1-1"] = PodTrouble("FailedMount", WORDS)
    cluster.settle()
    peers_give_up(cluster)
    assert cluster.phase() == "Waiting"
    (failure,) = cluster.status.last_failures
    assert (failure.failure_class, failure.stage) == ("NotStarted", 1)
    assert failure.reason == ("CreateContainerConfigError" if is_told_by_status else "FailedMount")
    assert 'secret "none" not found' in failure.message
    assert cluster.events[-1] == "GroupNotStarted"
    assert cluster.condition("Ready") == ("False", "NotStarted")
    cluster.advance(60)
    cluster.settle()
    assert (cluster.phase(), cluster.status.groups[0].restarts) == ("Starting", ())


def test_what_was_said_before_the_containers_ran_does_not_count_any_more() -> None:
    cluster = started()
    cluster.pod(1)["spec"]["nodeName"] = "node-1"
    cluster.troubles["tiny-0-1-1"] = PodTrouble("FailedMount", WORDS)
    cluster.settle()
    assert cluster.status.groups[0].stages[1].reason == "Starting"
    peers_give_up(cluster)
    assert cluster.status.last_failures[0].failure_class == "RendezvousTimeout"


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_that_all_wait_go_on_record_once_and_a_moments_wait_does_not(stages: int) -> None:
    """There is no peer that could give up on them."""
    cluster = started(parallelism={"pipeline": stages})
    for stage in range(stages):
        hang(cluster, stage, reason="CreateContainerConfigError", message='secret "none" not found')
    assert cluster.step().requeue_after_seconds == 10.0
    assert list(cluster.status.last_failures) == []
    cluster.advance(10)
    cluster.settle()
    (failure,) = cluster.status.last_failures
    assert (failure.failure_class, failure.stage, failure.incarnation) == ("NotStarted", 0, 1)
    assert failure.message == 'secret "none" not found'
    assert cluster.events == ["GroupNotStarted"]
    cluster.advance(600)
    cluster.settle()
    assert (len(cluster.status.last_failures), cluster.events) == (1, ["GroupNotStarted"])
    assert (cluster.phase(), cluster.status.groups[0].attempts) == ("Starting", 0), "it is waited for"


def test_what_the_kubelet_says_in_its_events_goes_on_record_without_peers() -> None:
    cluster = started(parallelism={"pipeline": 1})
    hang(cluster, 0)
    cluster.troubles["tiny-0-1-0"] = PodTrouble("FailedMount", WORDS)
    cluster.settle()
    (failure,) = cluster.status.last_failures
    assert (failure.failure_class, failure.reason) == ("NotStarted", "FailedMount")
    assert WORDS in failure.message


def test_trying_again_and_again_leaves_older_failures_on_record() -> None:
    cluster = started()
    cluster.end_container(1, 65)
    cluster.settle()
    for _ in range(8):
        cluster.advance(120)
        cluster.settle()
        hang(cluster, 1, reason="CreateContainerConfigError", message='secret "none" not found')
        cluster.settle()
        peers_give_up(cluster)
    assert cluster.status.groups[0].incarnation > 6
    assert [each.failure_class for each in cluster.status.last_failures] == ["NotStarted", "ModelLoad"]
