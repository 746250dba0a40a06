"""Walks of a model through scaling, rollouts and suspension, as exact sequences of states."""

from typing import Any

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_cli.rollout_commands import RESTARTED_AT
from stageline_operator.planner.objects.identity import revision_of
from stageline_operator.planner.types import VllmImages

IN_PLACE = {"maxSurge": 0, "maxUnavailable": 1}


def ready_cluster(**spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(**spec))
    bring_up(cluster)
    assert cluster.condition("Ready") == ("True", "AllGroupsReady"), cluster.status
    return cluster


def bring_up(cluster: PlannedCluster) -> None:
    """Everything that is made becomes ready, until nothing more is made."""
    for _ in range(12):
        cluster.settle()
        cluster.make_ready()
    cluster.settle()


def groups(cluster: PlannedCluster) -> list[tuple[int, int, str]]:
    """(index, incarnation, phase) of the groups on record."""
    return [(group.index, group.incarnation, group.phase) for group in cluster.status.groups]


def test_a_surge_is_ready_before_an_old_group_is_drained() -> None:
    cluster = ready_cluster(replicas=2)
    cluster.model = tiny_model(2, replicas=2, engine={"seed": 7})
    seen = []
    for _ in range(3):
        cluster.settle()
        seen.append(groups(cluster))
        cluster.make_ready()
    assert seen == [
        [(0, 1, "Ready"), (1, 1, "Ready"), (2, 1, "Starting")],
        [(0, 2, "Starting"), (1, 1, "Ready"), (2, 1, "Ready")],
        [(0, 2, "Ready"), (2, 1, "Ready")],
    ]
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")
    assert (cluster.status.replicas, cluster.status.updated_replicas) == (2, 2)


def test_the_only_group_stays_until_its_successor_is_ready() -> None:
    cluster = ready_cluster()
    cluster.model = tiny_model(2, template={"image": "broken"})
    cluster.settle()
    for pod in cluster.pods.values():
        if pod["metadata"]["name"].startswith("tiny-1-"):
            waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
            for each in pod["status"]["containerStatuses"]:
                each["state"] = waiting
    for _ in range(20):
        cluster.advance(600)
        cluster.settle()
    assert groups(cluster) == [(0, 1, "Ready"), (1, 1, "Starting")]
    assert cluster.condition("Available")[0] == "True"
    assert cluster.condition("Progressing") == ("False", "ProgressDeadlineExceeded")
    assert "no such image" in cluster.condition_message("Progressing")
    assert [each.failure_class for each in cluster.status.last_failures] == ["ImagePull"]
    cluster.model = tiny_model(3)
    cluster.settle()
    assert groups(cluster) == [(0, 1, "Ready")], "going back restarts nothing"
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")


def test_without_a_surge_the_last_ready_group_waits_for_a_new_one() -> None:
    rollout = {"maxSurge": 0, "maxUnavailable": 3}
    cluster = ready_cluster(replicas=3, rollout=rollout)
    cluster.model = tiny_model(2, replicas=3, rollout=rollout, engine={"seed": 7})
    cluster.settle()
    assert groups(cluster) == [(0, 2, "Starting"), (1, 2, "Starting"), (2, 1, "Ready")]
    bring_up(cluster)
    assert groups(cluster) == [(0, 2, "Ready"), (1, 2, "Ready"), (2, 2, "Ready")]


def test_a_partition_keeps_groups_as_they_are_even_when_they_restart() -> None:
    rollout = {**IN_PLACE, "partition": 2}
    cluster = ready_cluster(replicas=3, rollout=rollout)
    old = cluster.status.groups[0].revision
    cluster.model = tiny_model(2, replicas=3, rollout=rollout, template={"image": "next"})
    bring_up(cluster)
    assert [group.revision == old for group in cluster.status.groups] == [True, True, False]
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")
    cluster.end_container(1, 137, group=0)
    cluster.settle()
    cluster.advance(2)
    bring_up(cluster)
    assert groups(cluster)[0] == (0, 2, "Ready")
    images = {name: pod["spec"]["containers"][0]["image"] for name, pod in cluster.pods.items()}
    assert images["tiny-0-2-0"] == "stageline:test", images
    assert images["tiny-2-2-0"] == "next", images
    cluster.model = tiny_model(3, replicas=3, rollout=IN_PLACE, template={"image": "next"})
    bring_up(cluster)
    assert all(group.revision != old for group in cluster.status.groups)


def test_rapid_edits_take_nothing_down_and_the_last_one_wins() -> None:
    cluster = ready_cluster(replicas=2)
    for number in range(2, 12):
        cluster.model = tiny_model(number, replicas=2, engine={"seed": number})
        cluster.step()
        assert sum(group.phase == "Ready" for group in cluster.status.groups) == 2, groups(cluster)
    bring_up(cluster)
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")
    seeds = [each["data"]["config.json"] for (kind, _), each in cluster.objects.items() if kind == "ConfigMap"]
    assert len(seeds) == 1
    assert '"seed": 11' in seeds[0]


def test_more_stages_do_not_make_old_groups_look_incomplete() -> None:
    cluster = ready_cluster()
    cluster.model = tiny_model(2, parallelism={"pipeline": 3})
    cluster.settle()
    assert groups(cluster) == [(0, 1, "Ready"), (1, 1, "Starting")]
    assert [len(group.stages) for group in cluster.status.groups] == [2, 3]
    bring_up(cluster)
    assert sorted(cluster.pods) == ["tiny-1-1-0", "tiny-1-1-1", "tiny-1-1-2"]


def test_scaling_up_and_down_and_up_never_uses_an_incarnation_twice() -> None:
    cluster = ready_cluster(replicas=3)
    names = set(cluster.pods)
    cluster.model = tiny_model(2, replicas=1)
    cluster.settle()
    assert sorted(cluster.pods) == ["tiny-0-1-0", "tiny-0-1-1"]
    assert "GroupRemoved" in cluster.events
    cluster.model = tiny_model(3, replicas=3)
    bring_up(cluster)
    assert groups(cluster) == [(0, 1, "Ready"), (1, 2, "Ready"), (2, 2, "Ready")]
    assert names & set(cluster.pods) == {"tiny-0-1-0", "tiny-0-1-1"}


def test_scaling_down_prefers_groups_that_do_not_answer() -> None:
    cluster = ready_cluster(replicas=3)
    cluster.end_container(0, 137, group=0)
    cluster.settle()
    cluster.model = tiny_model(2, replicas=2)
    cluster.settle()
    assert groups(cluster) == [(1, 1, "Ready"), (2, 1, "Ready")]


def test_a_group_that_drains_keeps_its_nodes_from_a_surge() -> None:
    cluster = ready_cluster()
    cluster.holds_deletions = True
    cluster.model = tiny_model(2, engine={"seed": 1})
    bring_up(cluster)
    assert groups(cluster) == [(0, 1, "Draining"), (1, 1, "Ready")]
    cluster.model = tiny_model(3, engine={"seed": 2})
    bring_up(cluster)
    assert groups(cluster) == [(0, 1, "Draining"), (1, 1, "Ready")], "no third group while two hold nodes"


def test_suspending_removes_all_groups_and_resuming_starts_new_ones() -> None:
    cluster = ready_cluster(replicas=2)
    cluster.model = tiny_model(2, replicas=2, suspend=True)
    cluster.settle()
    assert (cluster.pods, cluster.status.groups, cluster.status.replicas) == ({}, (), 0)
    assert {kind: cluster.condition(kind) for kind in ("Available", "Progressing", "Degraded", "Ready")} == {
        "Available": ("False", "GroupsNotReady"),
        "Progressing": ("False", "Suspended"),
        "Degraded": ("False", "AsExpected"),
        "Ready": ("False", "Suspended"),
    }
    kinds = sorted(kind for kind, _ in cluster.objects)
    assert kinds == ["ConfigMap", "NetworkPolicy", "NetworkPolicy", "Secret", "Secret", "Service", "Service"]
    cluster.model = tiny_model(3, replicas=2)
    bring_up(cluster)
    assert groups(cluster) == [(0, 2, "Ready"), (1, 2, "Ready")]
    assert [event for event in cluster.events if event in ("Suspended", "Resumed")] == ["Suspended", "Resumed"]


def test_an_operator_with_another_default_image_restarts_nothing() -> None:
    cluster = ready_cluster()
    before = dict(cluster.pods)
    cluster.default_image = "stageline:next"
    cluster.settle()
    assert cluster.pods == before
    cluster.end_container(0, 137)
    cluster.settle()
    cluster.advance(2)
    cluster.settle()
    assert {each["spec"]["containers"][0]["image"] for each in cluster.pods.values()} == {"stageline:next"}


def test_a_group_cut_short_by_a_crash_is_completed_with_the_image_it_began_with() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.step()
    cluster.step()
    del cluster.objects[("Pod", "tiny-0-1-1")]
    cluster.default_image = "stageline:next"
    cluster.step()
    assert {each["spec"]["containers"][0]["image"] for each in cluster.pods.values()} == {"stageline:test"}
    assert sorted(cluster.pods) == ["tiny-0-1-0", "tiny-0-1-1"]


def test_a_group_under_vllm_is_completed_with_the_images_it_began_with() -> None:
    def images() -> dict[str, str]:
        (pod,) = (cluster.pods[name] for name in cluster.pods if name.endswith("-1"))
        return {each["name"]: each["image"] for each in pod["spec"]["initContainers"] + pod["spec"]["containers"]}

    cluster = PlannedCluster(tiny_model(engine={"name": "vllm"}))
    cluster.vllm_images = VllmImages("vllm:1")
    cluster.step()
    cluster.step()
    before = images()
    assert (before["stage"], before["vllm-files"]) == ("vllm:1", "stageline:test")
    del cluster.objects[("Pod", "tiny-0-1-1")]
    cluster.vllm_images = VllmImages("vllm:2", "files:2")
    cluster.step()
    assert images() == before
    cluster.settle()
    cluster.end_container(0, 137)
    cluster.settle()
    cluster.advance(2)
    cluster.settle()
    assert (images()["stage"], images()["vllm-files"]) == ("vllm:2", "files:2"), "the next incarnation takes them"


def test_a_group_that_an_operator_without_images_for_vllm_began_is_completed_with_its_one_image() -> None:
    """Such an operator put no more than `image` on record; stages of two kinds don't find together."""
    cluster = PlannedCluster(tiny_model(engine={"name": "vllm"}))
    cluster.step()
    cluster.step()
    begun = [each.model_copy(update={"vllm_image": None, "vllm_files_image": None}) for each in cluster.status.groups]
    cluster.status = cluster.status.model_copy(update={"groups": tuple(begun)})
    assert begun[0].image == "stageline:test"
    del cluster.objects[("Pod", "tiny-0-1-1")]
    cluster.vllm_images = VllmImages("vllm:2", "files:2")
    cluster.step()
    made = cluster.pods["tiny-0-1-1"]["spec"]
    assert {each["image"] for each in made["initContainers"] + made["containers"]} == {"stageline:test"}
    assert made["containers"][0]["image"] == cluster.pods["tiny-0-1-0"]["spec"]["containers"][0]["image"]


def test_the_progress_deadline_starts_anew_with_each_group_that_becomes_ready() -> None:
    cluster = PlannedCluster(tiny_model(replicas=2, rollout={"progressDeadlineSeconds": 100}))
    cluster.settle()
    cluster.advance(99)
    for stage in range(2):
        cluster.pod(stage, group=1)["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    cluster.settle()
    cluster.advance(99)
    cluster.settle()
    assert cluster.condition("Progressing") == ("True", "GroupsStarting")
    cluster.advance(1)
    cluster.settle()
    assert cluster.condition("Progressing") == ("False", "ProgressDeadlineExceeded")
    assert cluster.events.count("ProgressDeadlineExceeded") == 1
    cluster.make_ready()
    cluster.settle()
    assert cluster.condition("Progressing") == ("False", "AsExpected")


@pytest.mark.parametrize(
    ("field", "value"), [("replicas", 3), ("restart", {"maxRestarts": 1}), ("timeouts", {"schedulingSeconds": 9})]
)
def test_policies_are_changed_without_restarting_anything(field: str, value: Any) -> None:
    cluster = ready_cluster()
    cluster.model = tiny_model(2, **{field: value})
    cluster.settle()
    assert groups(cluster)[0] == (0, 1, "Ready")


def failed_cluster(**spec: Any) -> PlannedCluster:
    """Two groups, of which the first is down for good."""
    cluster = ready_cluster(replicas=2, restart={"maxRestarts": 1}, **spec)
    for _ in range(2):
        cluster.end_container(0, 137)
        cluster.settle()
        cluster.advance(2)
        cluster.settle()
    assert groups(cluster) == [(0, 2, "Failed"), (1, 1, "Ready")]
    return cluster


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 3},
        {"restart": {"maxRestarts": 9}},
        {"timeouts": {"schedulingSeconds": 9}},
        {"rollout": {"maxSurge": 2}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_group_that_is_down_stays_down_when_an_autoscaler_or_a_policy_changes_the_spec(
    change: dict[str, Any],
) -> None:
    cluster = failed_cluster()
    restarts = cluster.status.groups[0].restarts
    spec: dict[str, Any] = {"replicas": 2, "restart": {"maxRestarts": 1}} | change
    cluster.model = tiny_model(2, **spec)
    bring_up(cluster)
    assert groups(cluster)[:2] == [(0, 2, "Failed"), (1, 1, "Ready")]
    assert cluster.status.groups[0].restarts == restarts
    assert cluster.condition("Degraded") == ("True", "RestartBudgetSpent")


def test_a_new_revision_tries_a_group_that_is_down_again() -> None:
    cluster = failed_cluster()
    cluster.model = tiny_model(2, replicas=2, restart={"maxRestarts": 1}, template={"image": "mended"})
    bring_up(cluster)
    assert [phase for *_, phase in groups(cluster)] == ["Ready", "Ready"]
    assert cluster.status.groups[0].restarts == ()


def test_rollouts_in_place_and_restarts_by_hand_use_up_no_restart() -> None:
    """`StagelineGroupRestarting` counts what is used up: lives that were made on purpose are no trouble."""
    cluster = ready_cluster(rollout=IN_PLACE)
    by_hand = {"image": "second", "annotations": {RESTARTED_AT: "2026-01-01T00:00:00Z"}}
    for generation, template in enumerate(({"image": "second"}, by_hand), start=2):
        cluster.model = tiny_model(generation, rollout=IN_PLACE, template=template)
        bring_up(cluster)
    assert groups(cluster) == [(0, 3, "Ready")], "two lives more, one after the other"
    assert (cluster.status.groups[0].restarts, cluster.status.last_failures) == ((), ())


def test_scaling_does_not_cut_a_back_off_short() -> None:
    cluster = ready_cluster(replicas=2, restart={"backoffSeconds": 60})
    cluster.end_container(0, 137)
    cluster.settle()
    assert groups(cluster)[0] == (0, 1, "BackingOff")
    for generation, replicas in enumerate((3, 2, 3), start=2):
        cluster.model = tiny_model(generation, replicas=replicas, restart={"backoffSeconds": 60})
        cluster.settle()
        assert cluster.status.groups[0].phase in ("BackingOff", "Ready"), cluster.status.groups
    assert all(group.incarnation == 1 for group in cluster.status.groups if group.index == 0)


def test_an_autoscaler_does_not_put_the_progress_deadline_off() -> None:
    rollout = {"progressDeadlineSeconds": 100}
    cluster = PlannedCluster(tiny_model(replicas=2, rollout=rollout))
    cluster.settle()
    for generation in range(2, 6):
        cluster.advance(30)
        cluster.model = tiny_model(generation, replicas=2 + generation % 2, rollout=rollout)
        cluster.settle()
    assert cluster.condition("Progressing") == ("False", "ProgressDeadlineExceeded")


def test_scaling_a_model_that_was_ready_for_long_gives_the_new_group_all_of_the_deadline() -> None:
    rollout = {"progressDeadlineSeconds": 100}
    cluster = ready_cluster(rollout=rollout)
    cluster.advance(86400)
    cluster.model = tiny_model(2, replicas=2, rollout=rollout)
    cluster.settle()
    cluster.advance(99)
    cluster.settle()
    assert cluster.condition("Progressing") == ("True", "GroupsStarting")
    cluster.advance(1)
    cluster.settle()
    assert cluster.condition("Progressing") == ("False", "ProgressDeadlineExceeded")


BAD: dict[str, Any] = {"template": {"image": "never-ready"}}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_group_that_fails_during_a_bad_rollout_comes_back_as_it_was(replicas: int) -> None:
    cluster = ready_cluster(replicas=replicas)
    good = cluster.status.groups[0].revision
    cluster.model = tiny_model(2, replicas=replicas, **BAD)
    cluster.settle()
    assert cluster.status.groups[-1].phase == "Starting"
    cluster.end_container(0, 137)
    cluster.settle()
    cluster.advance(2)
    cluster.settle()
    make_ready_at(cluster, good)
    cluster.settle()
    assert groups(cluster)[0] == (0, 2, "Ready")
    assert cluster.status.groups[0].revision == good
    assert cluster.status.ready_replicas == replicas


def make_ready_at(cluster: PlannedCluster, revision: str) -> None:
    for pod in cluster.pods.values():
        if pod["metadata"]["labels"]["stageline.dev/revision"] == revision:
            pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]


def test_the_mended_revision_takes_the_place_of_groups_that_never_served_at_once() -> None:
    cluster = PlannedCluster(tiny_model(replicas=2, **BAD))
    cluster.settle()
    cluster.model = tiny_model(2, replicas=2)
    bring_up(cluster)
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")
    assert cluster.status.updated_replicas == 2


def test_in_place_a_group_that_failed_makes_room_for_the_new_revision_as_far_as_the_bounds_allow() -> None:
    cluster = ready_cluster(replicas=3, rollout=IN_PLACE)
    good = cluster.status.groups[0].revision
    cluster.model = tiny_model(2, replicas=3, rollout=IN_PLACE, **BAD)
    cluster.settle()
    for group in (1, 2):
        cluster.end_container(0, 137, group=group)
        cluster.settle()
        cluster.advance(2)
        cluster.settle()
        make_ready_at(cluster, good)
        cluster.settle()
    assert [group.revision == good for group in cluster.status.groups] == [False, True, True]
    assert cluster.status.ready_replicas == 2


def test_a_group_waits_for_nodes_behind_groups_of_its_own_revision_alone() -> None:
    """The new revision has the lower index, and never finds all its nodes."""
    limits = {"schedulingSeconds": 100}
    cluster = ready_cluster(timeouts=limits)
    cluster.model = tiny_model(2, timeouts=limits, engine={"seed": 1})
    bring_up(cluster)
    assert groups(cluster) == [(1, 1, "Ready")]
    cluster.model = tiny_model(3, timeouts=limits, **BAD)
    cluster.settle()
    assert groups(cluster) == [(0, 2, "Starting"), (1, 1, "Ready")]
    place(cluster, 0, 0)
    pending(cluster, 0, 1)
    cluster.end_container(0, 137, group=1)
    for _ in range(20):
        cluster.settle()
        cluster.advance(30)
        for group in cluster.status.groups:
            if group.phase in ("Creating", "Starting"):
                place(cluster, group.index, 0)
                pending(cluster, group.index, 1)
    tried = {group.index: group.incarnation for group in cluster.status.groups}
    assert tried[1] > 2, cluster.status.groups


def place(cluster: PlannedCluster, group: int, stage: int) -> None:
    for pod in cluster.pods.values():
        own = pod["metadata"]["labels"]
        if (own["stageline.dev/group"], own["stageline.dev/stage"]) == (str(group), str(stage)):
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]


def pending(cluster: PlannedCluster, group: int, stage: int) -> None:
    for pod in cluster.pods.values():
        own = pod["metadata"]["labels"]
        if (own["stageline.dev/group"], own["stageline.dev/stage"]) == (str(group), str(stage)):
            words = {"reason": "Unschedulable", "message": "no node"}
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", **words}]


def test_a_model_at_zero_has_no_group_is_as_its_spec_says_and_comes_back() -> None:
    cluster = ready_cluster(replicas=2)
    cluster.model = tiny_model(2, replicas=0)
    cluster.settle()
    assert (cluster.status.groups, sorted(cluster.pods)) == ((), [])
    assert cluster.condition("Ready") == ("True", "ScaledToZero")
    assert cluster.condition("Available") == ("False", "ScaledToZero")
    assert cluster.condition("Stalled") == ("False", "AsExpected")
    cluster.advance(86400)
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "ScaledToZero")
    cluster.model = tiny_model(3, replicas=1)
    cluster.settle()
    assert cluster.condition("Progressing") == ("True", "GroupsStarting")
    cluster.make_ready()
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")


def test_a_change_while_at_zero_is_what_the_next_group_is_made_of() -> None:
    cluster = ready_cluster()
    cluster.model = tiny_model(2, replicas=0)
    cluster.settle()
    cluster.model = tiny_model(3, replicas=0, engine={"seed": 7})
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "ScaledToZero")
    cluster.model = tiny_model(4, replicas=1, engine={"seed": 7})
    cluster.settle()
    (group,) = cluster.status.groups
    assert group.revision == revision_of(cluster.model)
