"""A group whose pods can't all be made: who is refused is on record, and what it holds goes to others."""

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api.failures import FailureClass, TerminationMessage


def model_of(uid: str = "u-1", pods: int = 4, seconds: int = 60) -> PlannedCluster:
    model = tiny_model(parallelism={"pipeline": pods}, timeouts={"schedulingSeconds": seconds})
    return PlannedCluster(model.model_copy(update={"metadata": model.metadata.model_copy(update={"uid": uid})}))


def limited(cluster: PlannedCluster, room: int) -> PlannedCluster:
    cluster.quota = lambda: len(cluster.pods) < room
    return cluster


def test_a_refused_stage_says_so_in_the_api_servers_words() -> None:
    cluster = limited(model_of(), 3)
    cluster.settle()
    rows = [(row.index, row.reason, row.message) for row in cluster.status.groups[0].stages]
    assert rows[3] == (3, "QuotaExceeded", "exceeded quota: pods")
    assert cluster.condition("Ready") == ("False", "QuotaExceeded")
    assert "stage 3 of group 0 is pending since 2026-01-01T00:00:00Z: exceeded quota" in cluster.condition_message(
        "Ready"
    )
    (failure,) = cluster.status.last_failures
    assert (failure.failure_class, failure.stage) == ("QuotaExceeded", 3)
    assert cluster.events == ["QuotaExceeded"]
    assert cluster.phase() == "Creating"


def test_the_missing_pods_are_made_when_the_quota_has_room_and_not_before_it_is_time() -> None:
    cluster = limited(model_of(), 3)
    cluster.settle()
    planned = cluster.step()
    assert planned.requeue_after_seconds == 10
    limited(cluster, 4)
    cluster.advance(9)
    cluster.settle()
    assert len(cluster.pods) == 3, "it is not asked again all the time"
    cluster.advance(1)
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    assert cluster.phase() == "Ready"
    assert cluster.status.groups[0].incarnation == 1


def test_a_group_that_lacks_a_pod_gives_its_places_back_without_a_restart() -> None:
    cluster = limited(model_of(), 3)
    cluster.settle()
    for _ in range(12):
        cluster.advance(10)
        cluster.settle()
        if not cluster.pods:
            break
    assert (cluster.phase(), cluster.pods) == ("Waiting", {})
    assert cluster.condition("Ready") == ("False", "QuotaExceeded")
    cluster.advance(60)
    cluster.settle()
    assert (cluster.phase(), len(cluster.pods)) == ("Creating", 3)
    assert cluster.status.groups[0].restarts == ()


def test_peers_that_wait_in_vain_for_a_refused_stage_are_not_to_blame() -> None:
    cluster = limited(model_of(seconds=3600), 3)
    cluster.settle()
    words = TerminationMessage(failure_class=FailureClass.RENDEZVOUS_TIMEOUT, stage=0, detail="stage 3 did not come")
    cluster.end_container(0, 70, words)
    cluster.settle()
    assert (cluster.phase(), cluster.status.groups[0].restarts) == ("Waiting", ())
    assert [each.failure_class for each in cluster.status.last_failures] == ["QuotaExceeded"]


@pytest.mark.parametrize("pair", range(6))
def test_two_models_that_share_a_quota_for_one_do_not_hold_half_each_for_ever(pair: int) -> None:
    clusters = [model_of(f"u-{pair}-{number}") for number in range(2)]
    for cluster in clusters:
        cluster.quota = lambda: sum(len(each.pods) for each in clusters) < 6
    clusters[0].step()
    clusters[1].step()
    clusters[0].quota, shared = lambda: len(clusters[0].pods) < 3, clusters[0].quota
    clusters[0].settle()
    clusters[0].quota = shared
    for second in range(900):
        for cluster in clusters:
            cluster.settle()
        if second == 0:
            assert [len(each.pods) for each in clusters] == [3, 3]
        if any(len(each.pods) == 4 for each in clusters):
            return
        for cluster in clusters:
            cluster.advance(1)
    raise AssertionError([cluster.status for cluster in clusters])
