"""A spec that this version refuses: its conditions say so, and its groups are reported as they are."""

from datetime import timedelta
from typing import Any

import pytest

from cluster.planned_cluster import SETTING, PlannedCluster, tiny_model
from stageline_api.manifests.manifest_loader import parse_manifest
from stageline_api.resource.field_problem import FieldProblem
from stageline_operator.planner.refused import plan_refused
from stageline_operator.planner.status.model_conditions import refused_status


def serving(**spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(**spec))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    return cluster


def refused(cluster: PlannedCluster) -> tuple[dict[str, Any], list[FieldProblem]]:
    """The model's manifest with a spec that no version takes, and what is wrong with it."""
    manifest = cluster.model.model_dump(mode="json", by_alias=True, exclude_none=True)
    manifest["metadata"]["generation"] = 2
    manifest["spec"]["parallelism"]["pipeline"] = -4
    problems = parse_manifest(manifest, ignores_unknown=True)
    assert isinstance(problems, list)
    return manifest, problems


def pass_over(cluster: PlannedCluster) -> None:
    """One pass while the spec is refused; no pod may be made or taken away by it."""
    planned = plan_refused(*refused(cluster), cluster.observe(), cluster.now, SETTING)
    assert not planned.delete
    assert {each["kind"] for each in planned.apply} <= {"PodDisruptionBudget"}
    cluster.status = planned.status
    cluster.objects |= {(each["kind"], each["metadata"]["name"]): each for each in planned.apply}


def kept(cluster: PlannedCluster) -> int:
    return int(cluster.objects[("PodDisruptionBudget", "tiny")]["spec"]["minAvailable"])


def lose_pod(cluster: PlannedCluster, group: int) -> None:
    name = cluster.pod(0, group)["metadata"]["name"]
    del cluster.objects[("Pod", name)]


def end_engine(cluster: PlannedCluster, group: int) -> None:
    cluster.end_container(0, 137, group=group)
    cluster.pod(0, group)["status"]["conditions"] = [{"type": "Ready", "status": "False"}]


@pytest.mark.parametrize("ends", [lose_pod, end_engine])
def test_pods_that_end_while_a_spec_is_refused_count_as_ended(ends: Any) -> None:
    cluster = serving(replicas=2)
    pass_over(cluster)
    assert (cluster.status.ready_replicas, kept(cluster)) == (2, 3)
    ends(cluster, 1)
    pass_over(cluster)
    assert (cluster.status.ready_replicas, cluster.condition("Available")[0]) == (1, "True")
    assert [group.phase for group in cluster.status.groups] == ["Ready", "Starting"]
    assert [row.ready for row in cluster.status.groups[1].stages] == [False, True]
    assert kept(cluster) == 2
    ends(cluster, 0)
    pass_over(cluster)
    assert (cluster.status.ready_replicas, cluster.condition("Available")) == (0, ("False", "GroupsNotReady"))
    assert cluster.condition("Degraded") == ("True", "BadConfiguration")
    assert kept(cluster) == 1
    before = cluster.status
    cluster.advance(3600)
    pass_over(cluster)
    assert cluster.status == before, "the same again is no news"


def test_a_group_that_becomes_ready_while_a_spec_is_refused_counts_as_ready() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.settle()
    pass_over(cluster)
    assert cluster.condition("Available") == ("False", "GroupsNotReady")
    cluster.make_ready()
    pass_over(cluster)
    assert (cluster.status.ready_replicas, cluster.condition("Available")[0]) == (1, "True")
    assert (cluster.phase(), cluster.status.groups[0].served, kept(cluster)) == ("Ready", True, 1)


@pytest.mark.parametrize("ends", [lose_pod, end_engine])
def test_what_ended_while_a_spec_was_refused_is_made_again_once_it_is_corrected(ends: Any) -> None:
    cluster = serving()
    ends(cluster, 0)
    pass_over(cluster)
    cluster.settle()
    cluster.advance(2)
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    assert (cluster.phase(), cluster.status.groups[0].incarnation) == ("Ready", 2)
    assert [each.incarnation for each in cluster.status.last_failures] == [1]


def test_groups_are_counted_where_no_accepted_spec_is_known() -> None:
    cluster = serving()
    cluster.objects = {key: each for key, each in cluster.objects.items() if key[0] != "ConfigMap"}
    lose_pod(cluster, 0)
    pass_over(cluster)
    assert (cluster.status.ready_replicas, cluster.condition("Available")[0]) == (0, "False")


def test_a_model_that_was_never_accepted_gets_nothing() -> None:
    cluster = PlannedCluster(tiny_model())
    pass_over(cluster)
    assert cluster.condition("Available") == ("False", "GroupsNotReady")
    assert (cluster.objects, cluster.status.groups) == ({}, ())


def test_a_refusal_names_the_field_and_leaves_groups_and_their_availability_as_they_were() -> None:
    cluster = serving(replicas=2)
    manifest, problems = refused(cluster)
    status = refused_status(cluster.status, manifest, problems, cluster.now)
    found = {each.type: (each.status, each.reason) for each in status.conditions}
    assert found["Degraded"] == found["Stalled"] == ("True", "BadConfiguration")
    assert found["Ready"] == found["Progressing"] == ("False", "BadConfiguration")
    assert found["Available"][0] == "True", "its groups serve on"
    assert {each.message for each in status.conditions if each.type == "Degraded"} == {str(problems[0])}
    assert (status.groups, status.observed_generation) == (cluster.status.groups, 2)
    later = refused_status(status, manifest, problems, cluster.now + timedelta(hours=1))
    assert later == status, "the same refusal is no news"
