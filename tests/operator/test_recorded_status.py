"""A recorded status of which a part can't be read loses that part alone, so nobody is replaced for it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_operator.controller.view.observe import recorded_status

Manifest = dict[str, Any]


def healthy(**spec: Any) -> PlannedCluster:
    """Three groups that are ready; the first failed once, long ago."""
    cluster = PlannedCluster(tiny_model(replicas=3, **spec))
    cluster.settle()
    cluster.end_container(1, 66)
    for _ in range(5):
        cluster.advance(100)
        cluster.settle()
    cluster.make_ready()
    cluster.settle()
    assert [group.phase for group in cluster.status.groups] == ["Ready"] * 3, cluster.status
    assert cluster.status.last_failures, cluster.status
    assert cluster.status.groups[0].restarts, cluster.status
    return cluster


def failure(**update: Any) -> Manifest:
    return {"time": "2026-01-01T00:00:00Z", "group": 1, "incarnation": 1, "failureClass": "Internal"} | update


def unknown_failure_class(status: Manifest) -> None:
    status["lastFailures"].insert(0, failure(failureClass="CosmicRay"))


def failure_without_a_class(status: Manifest) -> None:
    nameless = failure()
    del nameless["failureClass"]
    status["lastFailures"].append(nameless)


def failure_at_no_time(status: Manifest) -> None:
    status["lastFailures"].append(failure(time="yesterday"))


def failures_of_another_form(status: Manifest) -> None:
    status["lastFailures"] = {"newest": "CosmicRay"}


def unknown_group_phase(status: Manifest) -> None:
    status["groups"][1]["phase"] = "Hibernating"


def unknown_phase_of_all_groups(status: Manifest) -> None:
    for group in status["groups"]:
        group["phase"] = "Hibernating"


def group_phase_of_another_form(status: Manifest) -> None:
    status["groups"][1]["phase"] = {"name": "Ready"}


def unreadable_restart(status: Manifest) -> None:
    status["groups"][0]["restarts"].append("soon")


def unreadable_stage_row(status: Manifest) -> None:
    status["groups"][0]["stages"][1] |= {"ready": "almost", "since": 12.5, "pod": None}


def unknown_condition_type(status: Manifest) -> None:
    status["conditions"].append(dict(status["conditions"][0], type="Hibernating"))


def unknown_condition_status(status: Manifest) -> None:
    status["conditions"][0]["status"] = "Perhaps"


def condition_of_another_form(status: Manifest) -> None:
    status["conditions"].append("Ready")


def unreadable_counts(status: Manifest) -> None:
    status |= {"replicas": "three", "url": None, "progressedAt": "yesterday", "selector": 4}


def fields_of_a_later_version(status: Manifest) -> None:
    status["hibernation"] = {"since": "2026-01-01T00:00:00Z"}
    status["groups"][0]["temperature"] = 80
    status["groups"][0]["stages"][0]["temperature"] = 80
    status["lastFailures"][0]["temperature"] = 80


def much_at_once(status: Manifest) -> None:
    for change in (unknown_failure_class, failure_at_no_time, unknown_condition_status, unreadable_restart):
        change(status)
    unreadable_counts(status)


CHANGES: list[Callable[[Manifest], None]] = [
    unknown_failure_class,
    failure_without_a_class,
    failure_at_no_time,
    failures_of_another_form,
    unknown_group_phase,
    unknown_phase_of_all_groups,
    group_phase_of_another_form,
    unreadable_restart,
    unreadable_stage_row,
    unknown_condition_type,
    unknown_condition_status,
    condition_of_another_form,
    unreadable_counts,
    fields_of_a_later_version,
    much_at_once,
]
OF_EACH_CHANGE = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


def recorded(cluster: PlannedCluster, change: Callable[[Manifest], None]) -> PipelineModelStatus:
    """What the operator reads of the cluster's status after a change."""
    status = copy.deepcopy(cluster.status.to_manifest())
    change(status)
    return recorded_status({"status": status})


@OF_EACH_CHANGE
def test_no_group_is_replaced_for_a_part_that_can_not_be_read(change: Callable[[Manifest], None]) -> None:
    cluster = healthy()
    before, pods = cluster.status, sorted(cluster.pods)
    cluster.status = recorded(cluster, change)
    cluster.settle()
    assert sorted(cluster.pods) == pods
    assert [(group.index, group.incarnation, group.revision, group.phase) for group in cluster.status.groups] == [
        (group.index, group.incarnation, group.revision, "Ready") for group in before.groups
    ]
    assert [group.restarts for group in cluster.status.groups] == [group.restarts for group in before.groups]
    assert (cluster.condition("Ready")[0], cluster.status.ready_replicas) == ("True", 3)


def test_what_can_be_read_beside_a_failure_of_an_unknown_class_is_kept() -> None:
    cluster = healthy()
    assert recorded(cluster, unknown_failure_class) == cluster.status
    assert recorded(cluster, failure_at_no_time) == cluster.status
    assert recorded(cluster, fields_of_a_later_version) == cluster.status
    without_first = cluster.status.model_copy(update={"conditions": cluster.status.conditions[1:]})
    assert recorded(cluster, unknown_condition_status) == without_first


def test_groups_in_an_unknown_phase_that_serve_go_one_by_one_in_a_rollout() -> None:
    cluster = healthy(rollout={"maxUnavailable": 1, "maxSurge": 0})
    cluster.model = tiny_model(
        generation=2,
        replicas=3,
        rollout={"maxUnavailable": 1, "maxSurge": 0},
        template={"image": "stageline:next"},
    )
    cluster.status = recorded(cluster, unknown_phase_of_all_groups)
    cluster.step()
    leaving = [group.index for group in cluster.status.groups if group.phase == "Replacing"]
    assert len(leaving) == 1, cluster.status.groups


@pytest.mark.parametrize("status", [None, [], "Ready", 4, {"groups": "many"}, {"groups": {"0": {}}}])
def test_a_status_of_which_nothing_can_be_read_is_as_good_as_none(status: object) -> None:
    assert recorded_status({"status": status}) == PipelineModelStatus()


def nothing(status: Manifest) -> None:
    status.clear()


def own_entry_unreadable(status: Manifest) -> None:
    status["groups"][1]["incarnation"] = "newest"


def all_entries_gone(status: Manifest) -> None:
    del status["groups"]


@pytest.mark.parametrize("change", [nothing, own_entry_unreadable, all_entries_gone], ids=lambda each: each.__name__)
def test_groups_that_run_are_taken_up_again_from_their_pods(change: Callable[[Manifest], None]) -> None:
    cluster = healthy()
    before, pods = cluster.status, sorted(cluster.pods)
    cluster.status = recorded(cluster, change)
    assert len(cluster.status.groups) < 3
    cluster.settle()
    assert sorted(cluster.pods) == pods
    assert [(group.index, group.incarnation, group.revision, group.phase) for group in cluster.status.groups] == [
        (group.index, group.incarnation, group.revision, "Ready") for group in before.groups
    ]
    assert (cluster.condition("Ready")[0], cluster.status.ready_replicas) == ("True", 3)


def test_groups_of_an_older_revision_whose_status_is_lost_are_replaced_in_their_turn() -> None:
    rollout = {"maxUnavailable": 1, "maxSurge": 0}
    cluster = healthy(rollout=rollout)
    cluster.model = tiny_model(generation=2, replicas=3, rollout=rollout, template={"image": "stageline:next"})
    cluster.status = PipelineModelStatus()
    cluster.step()
    cluster.step()
    assert [group.index for group in cluster.status.groups if group.phase == "Replacing"] == [0]
    for _ in range(12):
        cluster.settle()
        cluster.make_ready()
        assert sum(group.phase != "Ready" for group in cluster.status.groups) <= 1, cluster.status.groups
    cluster.settle()
    assert cluster.status.updated_replicas == 3
    images = {each["spec"]["containers"][0]["image"] for each in cluster.pods.values()}
    assert images == {"stageline:next"}


def test_a_group_whose_status_is_lost_while_its_pods_are_made_is_completed() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.step()
    cluster.step()
    del cluster.objects[("Pod", "tiny-0-1-1")]
    cluster.status = PipelineModelStatus()
    cluster.step()
    cluster.step()
    assert sorted(cluster.pods) == ["tiny-0-1-0", "tiny-0-1-1"]
    cluster.make_ready()
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")


def test_pods_of_an_earlier_life_of_the_model_are_not_taken_up() -> None:
    cluster = healthy()
    for pod in cluster.pods.values():
        pod["metadata"]["ownerReferences"][0]["uid"] = "u-before"
    cluster.status = PipelineModelStatus()
    cluster.settle()
    owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in cluster.pods.values()}
    assert owners == {"u-1"}
    assert {group.incarnation for group in cluster.status.groups} == {2, 3}


def test_a_group_that_does_not_say_which_it_is_is_left_out_alone() -> None:
    cluster = healthy()

    def nameless(status: Manifest) -> None:
        status["groups"].append({"phase": "Ready", "incarnation": "newest"})

    assert recorded(cluster, nameless) == cluster.status


_SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("2026-01-01T00:00:00Z")
_NAMES = st.sampled_from(
    ["groups", "conditions", "lastFailures", "index", "incarnation", "restarts", "stages", "since", "type", "time"]
)
_ANYTHING = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4), max_leaves=20
)


@given(st.dictionaries(_NAMES, _ANYTHING, max_size=5))
def test_whatever_is_recorded_is_read_to_something_that_can_be_written_and_read_again(status: Manifest) -> None:
    given = copy.deepcopy(status)
    read = recorded_status({"status": status})
    assert status == given, "what was recorded is not touched"
    assert recorded_status({"status": read.to_manifest()}) == read
