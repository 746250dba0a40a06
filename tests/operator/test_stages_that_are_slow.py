"""A stage that pulls, prepares or waits for its volumes is waited for: its pod is kept, and no restart is used up."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api.failures import FailureClass, TerminationMessage
from stageline_operator.planner.group.cause import SETTLE_SECONDS

INITIALIZING = {"waiting": {"reason": "PodInitializing"}}
CREATING = {"waiting": {"reason": "ContainerCreating"}}
SCHEDULED = {"type": "PodScheduled", "status": "True"}
PATIENCE = "STAGELINE_RENDEZVOUS_SECONDS"


def init(**states: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name.replace("_", "-"), "ready": False, "state": state} for name, state in states.items()]


DONE = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-01T00:00:00Z"}}
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:09Z"}}
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "pulls": ({"initContainerStatuses": init(prepare=INITIALIZING)}, "container prepare does not exist yet"),
    "prepares": (
        {"initContainerStatuses": init(prepare=RUNNING)},
        "init container prepare runs since 2026-01-01T00:00:09Z",
    ),
    "runs-a-users-init-container": (
        {"initContainerStatuses": init(prepare=DONE, warm_up=RUNNING)},
        "init container warm-up runs",
    ),
    "pulls-the-last-image": ({"initContainerStatuses": init(prepare=DONE)}, "container stage does not exist yet"),
    "attaches-volumes": ({"main": CREATING}, "container stage does not exist yet"),
    "has-just-got-its-node": ({"main": None}, "its kubelet has not started it"),
}


def make_slow(cluster: PlannedCluster, stage: int, way: str = "pulls") -> dict[str, Any]:
    """The stage has a node, and its containers have not begun."""
    pod, given = cluster.pod(stage), dict(WAYS[way][0])
    main = given.pop("main", INITIALIZING)
    names = [each["name"] for each in pod["spec"]["containers"]]
    containers = [] if main is None else [{"name": name, "ready": False, "state": dict(main)} for name in names]
    pod["spec"]["nodeName"] = f"node-{stage}"
    pod["status"] = {"phase": "Pending", "conditions": [SCHEDULED], "containerStatuses": containers, **given}
    return pod


def begin(cluster: PlannedCluster, stage: int) -> None:
    pod = cluster.pod(stage)
    containers = [
        {"name": each["name"], "ready": False, "state": {"running": {}}} for each in pod["spec"]["containers"]
    ]
    pod["status"] = {"phase": "Running", "conditions": [SCHEDULED], "containerStatuses": containers}


def give_up(cluster: PlannedCluster, stage: int = 0, operation: str = "") -> None:
    """A pod waited in vain for the others: stage 0's engine for their hello, any other stage for the engine."""
    late = TerminationMessage(
        failure_class=FailureClass.RENDEZVOUS_TIMEOUT, peer=None, operation=operation, detail="not there in 120 s"
    )
    cluster.end_container(stage, 70, late, container="stage" if stage else "engine")
    if stage == 0:
        lost = TerminationMessage(failure_class=FailureClass.ENGINE_LOST, stage=0, detail="the engine is gone")
        cluster.end_container(0, 73, lost, at_seconds=0.1)
    cluster.settle()


def started(stages: int = 2, **spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(parallelism={"pipeline": stages}, **spec))
    cluster.settle()
    return cluster


def patience(pod: dict[str, Any]) -> str | None:
    variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    return variables.get(PATIENCE)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_kept_and_the_others_are_made_again_at_no_cost(way: str) -> None:
    cluster = started(restart={"maxRestarts": 0})
    slow, waited = make_slow(cluster, 1, way), cluster.pod(0)
    cluster.settle()
    sentence = WAYS[way][1]
    assert sentence in cluster.status.groups[0].stages[1].message
    assert "stage 1 of group 0: " in cluster.condition_message("Ready")
    assert sentence in cluster.condition_message("Ready")
    give_up(cluster)
    group = cluster.status.groups[0]
    assert (group.incarnation, group.phase, group.restarts, group.attempts) == (1, "Starting", (), 0)
    assert cluster.pod(1) is slow
    assert cluster.pod(0) is not waited
    (failure,) = cluster.status.last_failures
    assert (failure.failure_class, failure.stage) == ("NotStarted", 1)
    assert sentence in failure.message
    assert "not there in 120 s" in failure.message
    assert cluster.events == ["GroupNotStarted"]
    assert cluster.condition("Degraded")[0] == "False"
    begin(cluster, 1)
    cluster.make_ready()
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")


def test_a_stage_that_pulls_for_half_an_hour_is_met() -> None:
    cluster = started()
    slow = make_slow(cluster, 1)
    for _ in range(15):
        cluster.advance(120)
        give_up(cluster)
        assert cluster.pod(1) is slow
    assert [each.failure_class for each in cluster.status.last_failures] == ["NotStarted"]
    begin(cluster, 1)
    cluster.make_ready()
    cluster.settle()
    group = cluster.status.groups[0]
    assert (group.incarnation, group.phase, group.restarts) == (1, "Ready", ())


def test_of_several_slow_stages_each_is_kept_and_named() -> None:
    cluster = started(4)
    slow = [make_slow(cluster, 1, "prepares"), make_slow(cluster, 3, "pulls")]
    begun = cluster.pod(2)
    give_up(cluster)
    assert [cluster.pod(1), cluster.pod(3)] == slow
    assert cluster.pod(2) is not begun, "it was connected to the engine that ended"
    message = cluster.status.last_failures[0].message
    assert "prepare runs" in message
    assert "stage 3: its container prepare does not exist yet" in message
    assert "the engine timed out" in message


def test_only_whoever_gave_up_on_a_slow_engine_is_made_again() -> None:
    cluster = started(3)
    slow, other = make_slow(cluster, 0, "prepares"), cluster.pod(2)
    give_up(cluster, 1)
    assert cluster.pod(0) is slow
    assert cluster.pod(2) is other, "it still waits for the engine, as it should"
    assert cluster.status.last_failures[0].stage == 0
    assert "stage 1 timed out" in cluster.status.last_failures[0].message


def test_a_pod_that_has_not_even_a_node_explains_the_wait_too() -> None:
    cluster = started()
    cluster.pod(1)["status"] = {"phase": "Pending"}
    give_up(cluster)
    group = cluster.status.groups[0]
    assert (group.incarnation, group.restarts) == (1, ())
    assert "it has no node yet" in cluster.status.last_failures[0].message


def test_a_rendezvous_of_stages_that_have_all_begun_fails_as_ever() -> None:
    cluster = started()
    give_up(cluster)
    assert (cluster.phase(), len(cluster.status.groups[0].restarts)) == ("BackingOff", 1)
    assert cluster.status.last_failures[0].failure_class == "RendezvousTimeout"


@pytest.mark.parametrize("operation", ["tls", "join the ranks"])
def test_what_is_no_wait_for_another_pod_is_not_explained_by_a_slow_one(operation: str) -> None:
    cluster = started()
    make_slow(cluster, 1)
    give_up(cluster, operation=operation)
    assert len(cluster.status.groups[0].restarts) == 1
    assert cluster.status.last_failures[0].failure_class == "RendezvousTimeout"


def test_a_failure_of_another_stage_counts_though_one_is_slow() -> None:
    cluster = started(3)
    make_slow(cluster, 1)
    cluster.end_container(2, 65, "no such tensor", at_seconds=1)
    give_up(cluster)
    assert (cluster.phase(), len(cluster.status.groups[0].restarts)) == ("BackingOff", 1)
    assert (cluster.status.last_failures[0].failure_class, cluster.status.last_failures[0].stage) == ("ModelLoad", 2)


def test_a_slow_stage_that_fails_at_last_is_the_cause() -> None:
    cluster = started()
    slow = make_slow(cluster, 1, "prepares")
    give_up(cluster)
    ended = {"terminated": {"exitCode": 65, "message": "no space left on device", "finishedAt": None}}
    slow["status"] |= {"phase": "Failed", "initContainerStatuses": init(prepare=ended)}
    cluster.settle()
    assert len(cluster.status.groups[0].restarts) == 1
    failure = cluster.status.last_failures[0]
    assert (failure.failure_class, failure.container) == ("ModelLoad", "prepare")


def test_a_slow_stage_whose_node_is_lost_is_the_cause() -> None:
    cluster = started()
    make_slow(cluster, 1)
    cluster.lost_nodes.add("node-1")
    give_up(cluster)
    assert cluster.status.last_failures[0].failure_class == "NodeLost"
    cluster.advance(2)
    cluster.settle()
    assert cluster.status.groups[0].incarnation == 2


def test_pods_that_end_to_be_made_again_are_no_eviction_and_no_loss() -> None:
    cluster = started(3)
    slow = make_slow(cluster, 1)
    cluster.holds_deletions = True
    give_up(cluster)
    assert (cluster.phase(), cluster.status.groups[0].incarnation) == ("Creating", 1)
    lost = TerminationMessage(failure_class=FailureClass.ENGINE_LOST, stage=2, detail="the engine is gone")
    cluster.end_container(2, 73, lost)
    cluster.advance(SETTLE_SECONDS)
    cluster.settle()
    begin(cluster, 1)
    cluster.settle()
    assert (cluster.phase(), len(cluster.status.last_failures)) == ("Creating", 1)
    for stage in (0, 2):
        del cluster.objects["Pod", f"tiny-0-1-{stage}"]
        cluster.settle()
    group = cluster.status.groups[0]
    assert (group.phase, group.incarnation, group.restarts) == ("Starting", 1, ())
    assert cluster.pod(1) is slow
    assert not any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())


def test_a_person_can_still_scale_roll_out_and_suspend_meanwhile() -> None:
    cluster = started()
    make_slow(cluster, 1)
    give_up(cluster)
    cluster.model = tiny_model(2, parallelism={"pipeline": 2}, suspend=True)
    cluster.settle()
    assert (cluster.pods, cluster.status.groups) == ({}, ())


def test_whoever_comes_to_a_group_that_is_there_waits_for_longer() -> None:
    cluster = started(timeouts={"rendezvousSeconds": 30, "loadSeconds": 600})
    assert [patience(pod) for pod in cluster.pods.values()] == [None, None]
    make_slow(cluster, 1)
    give_up(cluster)
    assert (patience(cluster.pod(0)), patience(cluster.pod(1))) == ("630", None)
    assert {each["name"] for each in cluster.pod(0)["spec"]["containers"] if PATIENCE in str(each["env"])} == {
        "stage",
        "engine",
    }


@dataclass
class Arrivals:
    """Plays the kubelets and the stages of one group: each pulls once, prepares, and waits for as long as it may."""

    cluster: PlannedCluster
    pull_seconds: list[int]
    prepare_seconds: list[int]
    rendezvous_seconds: int
    begins: dict[str, float] = field(default_factory=dict)
    """When the containers of each pod begin, by its uid."""
    pulled: set[int] = field(default_factory=set)

    def meet(self, limit_seconds: int, step_seconds: int = 30) -> float:
        """Seconds until all have met."""
        for second in range(0, limit_seconds, step_seconds):
            waiting = [stage for stage in range(len(self.pull_seconds)) if self.is_there(stage, second)]
            if len(waiting) == len(self.pull_seconds):
                self.cluster.make_ready()
                self.cluster.settle()
                return second
            for stage in waiting:
                self.give_up_when_late(stage, second, engine_is_there=0 in waiting)
            self.cluster.advance(step_seconds)
        raise AssertionError(f"they never met: {self.cluster.status}")

    def is_there(self, stage: int, second: int) -> bool:
        pod = self.cluster.pod(stage)
        uid = pod["metadata"].setdefault("uid", f"uid-{len(self.begins)}")
        if uid not in self.begins:
            pull = 0 if stage in self.pulled else self.pull_seconds[stage]
            self.pulled.add(stage)
            self.begins[uid] = second + pull + self.prepare_seconds[stage]
            make_slow(self.cluster, stage)
            self.cluster.settle()
        if second < self.begins[uid]:
            return False
        if pod["status"]["phase"] == "Pending":
            begin(self.cluster, stage)
            self.cluster.settle()
        return True

    def give_up_when_late(self, stage: int, second: int, engine_is_there: bool) -> None:
        """The engine waits for all stages; a stage only until it has the engine."""
        pod = self.cluster.pod(stage)
        limit = float(patience(pod) or self.rendezvous_seconds)
        if (stage == 0 or not engine_is_there) and second - self.begins[pod["metadata"]["uid"]] >= limit:
            give_up(self.cluster, stage)


@given(
    st.integers(2, 4).flatmap(
        lambda stages: st.tuples(
            st.lists(st.integers(0, 1800), min_size=stages, max_size=stages),
            st.lists(st.integers(0, 900), min_size=stages, max_size=stages),
        )
    ),
    st.integers(30, 300),
)
def test_stages_meet_however_far_apart_they_arrive(times: tuple[list[int], list[int]], rendezvous: int) -> None:
    """Also where whoever is made again has lost its cache, and takes longer to prepare than the others would wait."""
    pulls, prepares = times
    cluster = started(len(pulls), timeouts={"rendezvousSeconds": rendezvous}, restart={"maxRestarts": 0})
    Arrivals(cluster, pulls, prepares, rendezvous).meet(4 * 3600)
    group = cluster.status.groups[0]
    assert (group.phase, group.incarnation, group.restarts) == ("Ready", 1, ())
