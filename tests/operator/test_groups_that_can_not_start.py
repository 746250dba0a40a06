"""What becomes of a group that finds no room, no image or no node any more: nobody's fault, so nobody's restart."""

from typing import Any

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api.failures import FailureClass, TerminationMessage
from stageline_operator.planner.group.cause import SETTLE_SECONDS
from stageline_operator.planner.plan import plan_ending

WORDS = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."


def place(cluster: PlannedCluster, group: int, stage: int, node: str = "") -> None:
    """A stage finds a node; without one it stays pending, with the scheduler's words."""
    pod, since = cluster.pod(stage, group), cluster.now.isoformat()
    scheduled: dict[str, Any] = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
    if node:
        pod["spec"]["nodeName"] = node
        state: dict[str, Any] = {"running": {}}
    else:
        scheduled |= {"status": "False", "reason": "Unschedulable", "message": WORDS}
        state = {"waiting": {"reason": "ContainerCreating"}}
    pod["status"]["conditions"] = [scheduled]
    for each in pod["status"]["containerStatuses"]:
        each["state"] = state


def phases(cluster: PlannedCluster) -> list[tuple[int, str]]:
    return [(group.incarnation, group.phase) for group in cluster.status.groups]


def half_placed(replicas: int = 1, **spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(replicas=replicas, timeouts={"schedulingSeconds": 100}, **spec))
    cluster.settle()
    for group in range(replicas):
        place(cluster, group, 0, f"node-{group}")
        place(cluster, group, 1)
    cluster.settle()
    return cluster


def test_a_pending_stage_shows_the_schedulers_words_and_since_when() -> None:
    cluster = half_placed()
    row = cluster.status.groups[0].stages[1]
    assert (row.reason, row.message) == ("Unschedulable", WORDS)
    assert row.since is not None
    assert row.since.isoformat() == cluster.now.isoformat()
    assert cluster.condition("Progressing") == ("True", "Unschedulable")
    assert cluster.condition("Ready") == ("False", "Unschedulable")
    assert WORDS in cluster.condition_message("Ready")
    assert "since 2026-01-01T00:00:00Z" in cluster.condition_message("Ready")


def test_a_half_placed_group_gives_its_nodes_back_and_tries_again_without_a_restart() -> None:
    cluster = half_placed()
    cluster.advance(99)
    cluster.settle()
    assert phases(cluster) == [(1, "Starting")]
    cluster.advance(61)  # the first in order holds on for up to 160 % of the time
    cluster.settle()
    assert (phases(cluster), sorted(cluster.pods)) == ([(1, "Waiting")], [])
    assert cluster.events[-1] == "GroupUnschedulable"
    assert cluster.condition("Ready") == ("False", "Unschedulable")
    failure = cluster.status.last_failures[0]
    assert (failure.failure_class, failure.stage, failure.message) == ("Unschedulable", 1, WORDS)
    cluster.advance(60)
    cluster.settle()
    assert phases(cluster) == [(2, "Starting")]
    assert cluster.status.groups[0].restarts == ()


def test_trying_often_leaves_older_failures_on_record() -> None:
    cluster = half_placed()
    for stage in range(2):
        place(cluster, 0, stage, f"node-{stage}")
    cluster.end_container(1, 65)
    cluster.settle()
    for _ in range(20):
        cluster.advance(200)
        cluster.settle()
        if len(cluster.pods) == 2:
            place(cluster, 0, 0, "node-0")
            place(cluster, 0, 1)
    assert cluster.status.groups[0].incarnation > 6
    assert [each.failure_class for each in cluster.status.last_failures] == ["Unschedulable", "ModelLoad"]


def test_a_group_that_holds_nothing_waits_for_ever() -> None:
    cluster = PlannedCluster(tiny_model(timeouts={"schedulingSeconds": 100}))
    cluster.settle()
    for stage in range(2):
        place(cluster, 0, stage)
    cluster.advance(86400)
    cluster.settle()
    assert phases(cluster) == [(1, "Starting")]


def test_of_two_half_placed_groups_the_first_keeps_its_nodes_and_gets_the_others() -> None:
    cluster = half_placed(replicas=2)
    cluster.advance(100)
    cluster.settle()
    assert phases(cluster) == [(1, "Starting"), (1, "Waiting")]
    place(cluster, 0, 1, "node-1")
    cluster.advance(60)
    cluster.settle()
    assert phases(cluster)[1] == (2, "Starting"), "the second tries again once the first has what it needs"


def test_the_second_does_not_try_while_the_first_still_seeks() -> None:
    cluster = half_placed(replicas=2)
    cluster.advance(161)
    cluster.settle()
    assert phases(cluster) == [(1, "Waiting"), (1, "Waiting")]
    cluster.advance(60)
    cluster.step()
    assert phases(cluster) == [(2, "Creating"), (1, "Waiting")]
    cluster.step()
    for stage in range(2):
        place(cluster, 0, stage)
    cluster.settle()
    assert phases(cluster) == [(2, "Starting"), (1, "Waiting")]
    for stage in range(2):
        place(cluster, 0, stage, f"node-{stage}")
    cluster.settle()
    assert phases(cluster) == [(2, "Starting"), (2, "Starting")]


def test_two_models_step_back_at_different_times() -> None:
    def held_seconds(uid: str) -> float:
        model = tiny_model(timeouts={"schedulingSeconds": 100})
        metadata = model.metadata.model_copy(update={"uid": uid})
        cluster = PlannedCluster(model.model_copy(update={"metadata": metadata}))
        cluster.settle()
        place(cluster, 0, 0, "node-0")
        place(cluster, 0, 1)
        wait_seconds = cluster.step().requeue_after_seconds
        assert wait_seconds is not None
        return wait_seconds

    held = [held_seconds(f"u-{number}") for number in range(8)]
    assert all(110 <= each < 160 for each in held), held
    assert len({round(each) for each in held}) > 4, held


def test_peers_that_give_up_on_a_pending_stage_use_up_no_restart() -> None:
    cluster = half_placed()
    words = TerminationMessage(failure_class=FailureClass.RENDEZVOUS_TIMEOUT, stage=0, detail="stage 1 did not come")
    cluster.end_container(0, 70, words)
    cluster.settle()
    assert phases(cluster) == [(1, "Waiting")]
    assert cluster.status.last_failures[0].failure_class == "Unschedulable"


def test_a_pod_that_a_kubelet_refuses_counts_as_unschedulable() -> None:
    cluster = half_placed()
    place(cluster, 0, 1, "node-1")
    cluster.pod(1)["status"] |= {
        "phase": "Failed",
        "reason": "OutOfnvidia.com/gpu",
        "message": "Node didn't have enough",
    }
    cluster.settle()
    assert phases(cluster) == [(1, "Waiting")]
    assert cluster.status.last_failures[0].failure_class == "Unschedulable"


def refuse_image(cluster: PlannedCluster, stage: int, reason: str = "ErrImagePull") -> None:
    for each in cluster.pod(stage)["status"]["containerStatuses"]:
        each["state"] = {"waiting": {"reason": reason, "message": "no such image"}}


def test_an_image_that_can_not_be_had_is_waited_for_and_told_once() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.settle()
    for reason in ("ErrImagePull", "ImagePullBackOff", "ErrImagePull"):
        refuse_image(cluster, 1, reason)
        cluster.settle()
    assert phases(cluster) == [(1, "Starting")]
    assert [(each.failure_class, each.stage) for each in cluster.status.last_failures] == [("ImagePull", 1)]
    assert cluster.events == ["ImagePullFailed"]
    assert cluster.condition("Ready") == ("False", "ImagePull")
    for each in cluster.pod(1)["status"]["containerStatuses"]:
        each["state"] = {"running": {}}
    cluster.make_ready()
    cluster.settle()
    assert phases(cluster) == [(1, "Ready")]


def test_peers_that_give_up_on_an_image_try_again_without_a_restart() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.settle()
    refuse_image(cluster, 1)
    cluster.settle()
    cluster.end_container(0, 70, "")
    cluster.settle()
    assert phases(cluster) == [(1, "Waiting")]
    cluster.advance(60)
    cluster.settle()
    assert phases(cluster) == [(2, "Starting")]
    assert cluster.status.groups[0].restarts == ()


@pytest.mark.parametrize("holds_deletions", [True, False])
def test_a_lost_node_replaces_the_group_without_its_kubelet(holds_deletions: bool) -> None:
    cluster = half_placed()
    place(cluster, 0, 1, "node-1")
    cluster.make_ready()
    cluster.settle()
    assert phases(cluster) == [(1, "Ready")]
    cluster.holds_deletions = holds_deletions
    cluster.lost_nodes.add("node-1")
    step = cluster.step()
    assert {each.name: each.grace_seconds for each in step.delete} == {"tiny-0-1-0": 3.0, "tiny-0-1-1": 0.0}
    failure = cluster.status.last_failures[0]
    assert (failure.failure_class, failure.stage, failure.message) == ("NodeLost", 1, "node node-1 is lost")
    cluster.objects.pop(("Pod", "tiny-0-1-0"), None)
    cluster.settle()
    cluster.advance(1)
    cluster.settle()
    assert phases(cluster) == [(2, "Starting")]


def unreachable(cluster: PlannedCluster, *groups: int) -> None:
    """Their nodes fall silent: the node controller takes the pods' readiness, and theirs alone, away."""
    for group in groups:
        for stage in range(2):
            pod = cluster.pod(stage, group)
            pod["spec"]["nodeName"] = f"node-{group}-{stage}"
            told = {"Ready": "False", "ContainersReady": "True"}
            pod["status"]["conditions"] = [{"type": kind, "status": status} for kind, status in told.items()]
            cluster.unheard_nodes.add(f"node-{group}-{stage}")


def test_pods_of_nodes_that_only_look_lost_are_left_alone_and_the_status_says_so() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    unreachable(cluster, 0)
    before = sorted(cluster.pods)
    planned = cluster.step()
    assert planned.requeue_after_seconds == 5, "nobody says when the other nodes are back"
    cluster.advance(600)
    cluster.settle()
    assert (sorted(cluster.pods), cluster.status.last_failures) == (before, ())
    row = cluster.status.groups[0].stages[0]
    assert (row.reason, row.message) == ("NodeUnreachable", "node node-0-0: 3 of 4 nodes can't be reached")
    assert cluster.condition("Ready") == ("False", "NodeUnreachable")
    assert cluster.events.count("NodesUnreachable") == 1
    cluster.unheard_nodes.clear()
    cluster.make_ready()
    cluster.settle()
    assert phases(cluster) == [(1, "Ready")]


def test_a_rollout_counts_groups_that_can_not_be_reached_among_those_that_serve() -> None:
    cluster = PlannedCluster(tiny_model(replicas=3))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    unreachable(cluster, 0, 1, 2)
    cluster.model = tiny_model(2, replicas=3, engine={"seed": 1})
    cluster.settle()
    assert {"tiny-0-1-0", "tiny-1-1-0", "tiny-2-1-0"} <= set(cluster.pods), cluster.status.groups


def test_of_a_model_that_is_deleted_only_ending_pods_of_lost_nodes_are_forced() -> None:
    cluster = half_placed(replicas=2)
    pods = [cluster.pod(stage, group) for group in (0, 1) for stage in (0, 1)]
    for number, pod in enumerate(pods):
        pod["spec"]["nodeName"] = f"node-{number}"
    for pod in pods[:3]:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.lost_nodes, cluster.unheard_nodes = {"node-1", "node-3"}, {"node-2"}
    (deletion,) = plan_ending(cluster.observe(), cluster.now)
    assert (deletion.name, deletion.grace_seconds) == ("tiny-0-1-1", 0.0)


def test_a_node_found_to_be_lost_later_becomes_the_cause_and_frees_the_group() -> None:
    cluster = half_placed()
    place(cluster, 0, 1, "node-1")
    cluster.make_ready()
    cluster.settle()
    cluster.holds_deletions = True
    words = TerminationMessage(
        failure_class=FailureClass.PEER_LOST, stage=0, rank=3, peer=1, detail="stage 1 is silent"
    )
    cluster.end_container(0, 71, words)
    cluster.advance(SETTLE_SECONDS)
    cluster.settle()
    assert (cluster.status.last_failures[0].failure_class, cluster.status.last_failures[0].rank) == ("PeerLost", 3)
    del cluster.objects[("Pod", "tiny-0-1-0")]
    cluster.settle()
    assert (phases(cluster), sorted(cluster.pods)) == ([(1, "Terminating")], ["tiny-0-1-1"])
    cluster.lost_nodes.add("node-1")
    cluster.settle()
    assert sorted(cluster.pods) == []
    (failure,) = cluster.status.last_failures
    assert (failure.failure_class, failure.stage, failure.rank, failure.incarnation) == ("NodeLost", 1, None, 1)
    assert failure.message == "node node-1 is lost; stage 0, rank 3 noticed: stage 1 is silent"


def test_an_evicted_pod_lets_its_group_drain() -> None:
    cluster = half_placed()
    place(cluster, 0, 1, "node-1")
    cluster.make_ready()
    cluster.settle()
    pod = cluster.pod(1)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    why = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "Eviction API"}
    pod["status"]["conditions"].append(why)
    step = cluster.step()
    assert [(each.name, each.grace_seconds) for each in step.delete] == [("tiny-0-1-0", None)]
    failure = cluster.status.last_failures[0]
    assert failure.failure_class == "Evicted"
    assert failure.message == "pod tiny-0-1-1 is being deleted: EvictionByEvictionAPI: Eviction API"


def test_ends_in_a_row_before_a_group_is_ready_are_a_crash_loop() -> None:
    cluster = PlannedCluster(tiny_model())
    classes = []
    for _ in range(4):
        cluster.settle()
        cluster.end_container(1, 1, "boom")
        cluster.settle()
        classes.append(str(cluster.status.last_failures[0].failure_class))
        cluster.advance(60)
    assert classes == ["Internal", "Internal", "CrashLoop", "CrashLoop"]
    assert cluster.status.last_failures[0].message == "ended 4 times in a row before it was ready; last: boom"


def test_the_restart_annotation_revives_a_group_that_is_down_once() -> None:
    cluster = PlannedCluster(tiny_model(restart={"maxRestarts": 0}))
    cluster.settle()
    cluster.end_container(0, 137)
    cluster.settle()
    assert cluster.condition("Degraded") == ("True", "RestartBudgetSpent")
    assert "RestartBudgetSpent" in cluster.events
    annotate(cluster, "now")
    cluster.settle()
    assert phases(cluster) == [(2, "Starting")]
    cluster.end_container(0, 137)
    cluster.settle()
    assert phases(cluster) == [(2, "Failed")], "the same value asks only once"
    annotate(cluster, "again")
    cluster.settle()
    assert phases(cluster) == [(3, "Starting")]
    assert cluster.events.count("RestartRequested") == 2


def annotate(cluster: PlannedCluster, value: str) -> None:
    metadata = cluster.model.metadata.model_copy(update={"annotations": {"stageline.dev/restart": value}})
    cluster.model = cluster.model.model_copy(update={"metadata": metadata})


def schedule_shared(clusters: list[PlannedCluster], nodes: list[str]) -> None:
    """Free nodes go to pending pods, one to each model in turn: the worst that a scheduler can do to both."""
    pods = [[p for p in cluster.pods.values() if "deletionTimestamp" not in p["metadata"]] for cluster in clusters]
    taken = {pod["spec"].get("nodeName") for own in pods for pod in own}
    free = [node for node in nodes if node not in taken]
    for turn in range(2):
        for cluster, own in zip(clusters, pods, strict=True):
            pending = [pod for pod in own if "nodeName" not in pod["spec"]]
            if free and turn < len(pending):
                stage = int(pending[turn]["metadata"]["labels"]["stageline.dev/stage"])
                place(cluster, 0, stage, free.pop(0))
    for cluster, own in zip(clusters, pods, strict=True):
        for pod in own:
            if "nodeName" not in pod["spec"]:
                place(cluster, 0, int(pod["metadata"]["labels"]["stageline.dev/stage"]))


@pytest.mark.parametrize("pair", range(10))
def test_two_models_that_hold_half_each_do_not_wait_for_each_other_for_ever(pair: int) -> None:
    clusters = []
    for number in (0, 1):
        model = tiny_model(timeouts={"schedulingSeconds": 60})
        metadata = model.metadata.model_copy(update={"uid": f"u-{pair}-{number}"})
        clusters.append(PlannedCluster(model.model_copy(update={"metadata": metadata})))
    for second in range(600):
        for cluster in clusters:
            cluster.settle()
        schedule_shared(clusters, ["node-0", "node-1"])
        if any(all("nodeName" in pod["spec"] for pod in c.pods.values()) and len(c.pods) == 2 for c in clusters):
            assert second > 60, "both held half at first"
            return
        for cluster in clusters:
            cluster.advance(1)
    raise AssertionError([cluster.status for cluster in clusters])
