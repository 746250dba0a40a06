"""Walks of a PipelineModel through its life, as exact sequences of states."""

from typing import Any

import pytest

from cluster.planned_cluster import START, PlannedCluster, tiny_model
from stageline_api.engine_access import KEYS_SECRET
from stageline_api.failures import FailureClass, TerminationMessage
from stageline_operator.planner.group.cause import SETTLE_SECONDS
from stageline_operator.planner.objects.identity import bus_secret_name
from stageline_operator.planner.plan import plan
from stageline_operator.planner.types import Observed, Setting


def ready_cluster(**spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(**spec))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "AllGroupsReady"), cluster.status
    return cluster


UNTIL = "not restarted again until the template or the annotation stageline.dev/restart changes"


def peer_lost(stage: int, peer: int) -> TerminationMessage:
    return TerminationMessage(failure_class=FailureClass.PEER_LOST, stage=stage, peer=peer, detail="lost my peer")


def test_an_incarnation_is_on_record_before_its_pods_exist() -> None:
    cluster = PlannedCluster(tiny_model())
    first = cluster.step()
    assert (cluster.phase(), cluster.status.groups[0].incarnation) == ("Creating", 1)
    assert sorted(cluster.pods) == []
    assert first.requeue_after_seconds == 0.0
    cluster.step()
    assert sorted(cluster.pods) == ["tiny-0-1-0", "tiny-0-1-1"]
    cluster.step()
    assert cluster.phase() == "Starting"
    assert cluster.condition("Progressing") == ("True", "GroupsStarting")


def test_a_group_is_ready_when_every_stage_is() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.settle()
    cluster.pod(0)["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    cluster.settle()
    assert cluster.phase() == "Starting"
    assert [row.ready for row in cluster.status.groups[0].stages] == [True, False]
    cluster.make_ready()
    cluster.settle()
    assert cluster.phase() == "Ready"
    assert cluster.status.ready_replicas == 1
    assert {kind: cluster.condition(kind)[0] for kind in ("Available", "Progressing", "Degraded", "Ready")} == {
        "Available": "True",
        "Progressing": "False",
        "Degraded": "False",
        "Ready": "True",
    }
    assert cluster.events == ["GroupReady"]


def test_a_group_is_made_anew_while_what_is_left_of_its_pods_is_cleared_away() -> None:
    """A kubelet takes most of a second for that; a pod of which something may still run is waited for."""
    cluster = ready_cluster()
    cluster.holds_deletions = True
    cluster.end_container(1, 137)
    cluster.end_container(0, 71, peer_lost(stage=0, peer=1), at_seconds=0.5)
    cluster.settle()
    cluster.advance(60)
    cluster.settle()
    assert cluster.phase() == "Terminating", "stage 0's engine still runs"
    cluster.end_container(0, 71, container="engine")
    cluster.settle()
    assert sorted(cluster.pods) == ["tiny-0-1-0", "tiny-0-1-1", "tiny-0-2-0", "tiny-0-2-1"]
    assert (cluster.phase(), cluster.status.groups[0].incarnation) == ("Starting", 2)
    for name in ("tiny-0-2-0", "tiny-0-2-1"):
        cluster.pods[name]["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    cluster.settle()
    assert cluster.phase() == "Ready", "whatever of the pods before is still there"
    assert cluster.status.ready_replicas == 1
    assert {row.pod for row in cluster.status.groups[0].stages} == {"tiny-0-2-0", "tiny-0-2-1"}


def test_a_killed_stage_replaces_the_group_after_the_back_off_and_its_cause_is_kept() -> None:
    cluster = ready_cluster()
    cluster.end_container(1, 137)
    cluster.end_container(0, 71, peer_lost(stage=0, peer=1), at_seconds=0.5)
    cluster.step()
    assert cluster.phase() == "Terminating"
    failure = cluster.status.last_failures[0]
    assert (failure.stage, failure.container, failure.failure_class) == (1, "stage", "Killed")
    assert (failure.exit_code, failure.message) == (137, "killed by SIGKILL")
    cluster.settle()
    assert (cluster.phase(), sorted(cluster.pods)) == ("BackingOff", [])
    assert cluster.condition("Progressing") == ("True", "BackingOff")
    assert "stage 1 of group 0 failed: Killed: killed by SIGKILL" in cluster.condition_message("Progressing")
    cluster.advance(0.9)
    cluster.settle()
    assert cluster.phase() == "BackingOff"
    cluster.advance(0.1)
    cluster.settle()
    assert (cluster.phase(), sorted(cluster.pods)) == ("Starting", ["tiny-0-2-0", "tiny-0-2-1"])
    assert cluster.status.last_failures == (failure,)


def test_the_rank_that_failed_first_is_on_record_and_in_the_event() -> None:
    cluster = ready_cluster()
    told = TerminationMessage(failure_class=FailureClass.PEER_LOST, stage=0, rank=1, peer=1, detail="lost my peer")
    cluster.end_container(0, 71, told)
    cluster.advance(SETTLE_SECONDS)
    events = [event.message for event in cluster.step().events]
    failure = cluster.status.last_failures[0]
    assert (failure.stage, failure.rank) == (0, 1)
    assert failure.to_manifest()["rank"] == 1
    sentence = "stage 0, rank 1 of group 0 failed: PeerLost: lost my peer"
    assert any(sentence in words for words in events), events


def test_a_group_whose_engine_was_told_to_drain_is_on_record_as_that() -> None:
    """Its stages and its engine ended with 0, and say why; the engine's clients may still read their last tokens."""
    cluster = ready_cluster()
    told = TerminationMessage(failure_class=FailureClass.EVICTED, stage=1, detail="told to drain by POST /v1/drain")
    cluster.make_ready(False)
    cluster.settle()
    cluster.end_container(1, 0, told, reason="Completed")
    cluster.settle()
    assert (cluster.phase(), cluster.status.last_failures) == ("Starting", ()), "what else ends may be the cause"
    cluster.advance(SETTLE_SECONDS)
    planned = cluster.step()
    assert {deletion.grace_seconds for deletion in planned.delete} == {None}
    failure = cluster.status.last_failures[0]
    assert (failure.failure_class, failure.exit_code, failure.message) == ("Evicted", 0, told.detail)
    cluster.settle()
    assert cluster.phase() == "BackingOff"
    cluster.advance(1)
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    assert (cluster.phase(), cluster.status.groups[0].incarnation) == ("Ready", 2)


def test_no_pod_is_made_while_an_old_one_is_still_ending() -> None:
    cluster = ready_cluster()
    cluster.holds_deletions = True
    cluster.end_container(1, 137)
    cluster.settle()
    cluster.advance(3600)
    cluster.settle()
    assert (cluster.phase(), sorted(cluster.pods)) == ("Terminating", ["tiny-0-1-0", "tiny-0-1-1"])


def test_back_off_doubles_up_to_a_minute_and_then_the_budget_is_spent() -> None:
    cluster = ready_cluster(restart={"maxRestarts": 7, "backoffSeconds": 4, "windowSeconds": 86400})
    waits = []
    while True:
        cluster.end_container(0, 137)
        cluster.settle()
        if cluster.phase() == "Failed":
            break
        until = cluster.status.groups[0].backoff_until
        assert until is not None
        waits.append((until - cluster.now).total_seconds())
        cluster.now = until
        cluster.settle()
        cluster.make_ready()
        cluster.settle()
    assert waits == [4, 8, 16, 32, 60, 60, 60]
    assert cluster.condition("Degraded") == ("True", "RestartBudgetSpent")
    message = cluster.condition_message("Degraded")
    assert message.endswith("killed by SIGKILL; restarted 7 times, " + UNTIL)
    assert len(cluster.status.last_failures) == 5
    cluster.advance(10 * 86400)
    cluster.settle()
    assert (cluster.phase(), sorted(cluster.pods)) == ("Failed", [])


def test_a_group_that_may_not_restart_says_which_field_says_so() -> None:
    cluster = ready_cluster(restart={"maxRestarts": 0})
    cluster.end_container(0, 137)
    cluster.settle()
    message = cluster.condition_message("Degraded")
    assert message.endswith("killed by SIGKILL; not restarted: spec.restart.maxRestarts is 0")


def test_old_restarts_leave_the_window() -> None:
    cluster = ready_cluster(restart={"maxRestarts": 1, "windowSeconds": 100})
    for _ in range(3):
        cluster.advance(101)
        cluster.end_container(0, 137)
        cluster.settle()
        cluster.advance(1)
        cluster.settle()
        cluster.make_ready()
        cluster.settle()
    assert cluster.phase() == "Ready"
    assert cluster.status.groups[0].incarnation == 4


def test_a_new_template_revives_a_group_that_spent_its_budget() -> None:
    cluster = ready_cluster(restart={"maxRestarts": 0})
    cluster.end_container(0, 137)
    cluster.settle()
    assert cluster.phase() == "Failed"
    cluster.model = tiny_model(generation=2, restart={"maxRestarts": 0}, template={"image": "mended"})
    cluster.settle()
    assert (cluster.phase(), sorted(cluster.pods)) == ("Starting", ["tiny-0-2-0", "tiny-0-2-1"])
    assert cluster.condition("Degraded") == ("False", "AsExpected")


def test_bad_configuration_is_never_tried_again_until_the_spec_changes() -> None:
    cluster = ready_cluster()
    detail = "parallelism.pipeline is 2 but the model has 1 layer"
    cluster.end_container(1, 64, TerminationMessage(failure_class=FailureClass.BAD_CONFIG, stage=1, detail=detail))
    cluster.settle()
    cluster.advance(86400)
    cluster.settle()
    assert (cluster.phase(), sorted(cluster.pods)) == ("Failed", [])
    assert cluster.condition("Degraded") == ("True", "BadConfiguration")
    assert detail in cluster.condition_message("Degraded")
    cluster.model = tiny_model(generation=2, parallelism={"pipeline": 1})
    cluster.settle()
    assert sorted(cluster.pods) == ["tiny-0-2-0"]


def test_without_room_for_a_surge_groups_are_replaced_in_place_one_at_a_time() -> None:
    in_place = {"maxSurge": 0, "maxUnavailable": 1}
    cluster = ready_cluster(replicas=2, rollout=in_place)
    cluster.model = tiny_model(generation=2, replicas=2, rollout=in_place, engine={"seed": 7})
    config_maps = [name for kind, name in cluster.objects if kind == "ConfigMap"]
    cluster.settle()
    assert [group.phase for group in cluster.status.groups] == ["Starting", "Ready"]
    assert sorted(cluster.pods) == ["tiny-0-2-0", "tiny-0-2-1", "tiny-1-1-0", "tiny-1-1-1"]
    assert cluster.condition("Ready")[0] == "False"
    cluster.make_ready()
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    assert sorted(cluster.pods) == ["tiny-0-2-0", "tiny-0-2-1", "tiny-1-2-0", "tiny-1-2-1"]
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")
    assert [name for kind, name in cluster.objects if kind == "ConfigMap"] != config_maps
    assert len([name for kind, name in cluster.objects if kind == "ConfigMap"]) == 1


def test_scaling_down_drains_the_last_group() -> None:
    cluster = ready_cluster(replicas=2)
    cluster.model = tiny_model(generation=2, replicas=1)
    cluster.settle()
    assert sorted(cluster.pods) == ["tiny-0-1-0", "tiny-0-1-1"]
    assert [group.index for group in cluster.status.groups] == [0]
    assert cluster.condition("Ready") == ("True", "AllGroupsReady")


def test_deleting_a_model_deletes_its_pods_before_what_they_read() -> None:
    cluster = ready_cluster()
    cluster.model = tiny_model(deleted=True)
    cluster.step()
    assert (sorted(cluster.pods), ("Secret", bus_secret_name(cluster.model)) in cluster.objects) == ([], True)
    cluster.settle()
    assert cluster.objects == {}


def test_a_vanished_pod_fails_its_group() -> None:
    cluster = ready_cluster()
    del cluster.objects[("Pod", "tiny-0-1-1")]
    cluster.step()
    assert (cluster.status.last_failures[0].failure_class, cluster.status.last_failures[0].stage) == ("NodeLost", 1)
    assert "tiny-0-1-1" in cluster.status.last_failures[0].message


def test_pods_nobody_remembers_that_end_are_replaced_and_never_named_again() -> None:
    cluster = ready_cluster()
    cluster.status = type(cluster.status)()
    for pod in cluster.pods.values():
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.step()
    for name in list(cluster.pods):
        del cluster.objects[("Pod", name)]
    cluster.settle()
    assert sorted(cluster.pods) == ["tiny-0-2-0", "tiny-0-2-1"]


def test_the_status_names_the_gateway_of_the_models_own_namespace() -> None:
    for urls, shown in (({"default": "http://gw.sys.svc:8080/v1"}, "http://gw.sys.svc:8080/v1"), ({"other": "u"}, "")):
        planned = plan(tiny_model(), Observed(), START, "t", Setting("image", gateway_urls=urls))
        assert planned.status.url == shown


def test_secrets_are_made_once_and_none_tells_of_another() -> None:
    cluster = PlannedCluster(tiny_model())
    names = (bus_secret_name(cluster.model), KEYS_SECRET)
    cluster.step(token="first")
    made = [cluster.objects[("Secret", name)]["stringData"] for name in names]
    cluster.step(token="second")
    assert [cluster.objects[("Secret", name)]["stringData"] for name in names] == made
    drawn = [value for data in made for value in data.values()]
    assert len(set(drawn)) == 2, drawn
    assert all(len(value) == 64 and "first" not in value for value in drawn), drawn


def test_an_image_that_cannot_be_pulled_is_the_cause_by_name() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.settle()
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "image 'nope' is not known"}}
    cluster.pod(1)["status"]["containerStatuses"][0]["state"] = waiting
    cluster.step()
    failure = cluster.status.last_failures[0]
    assert (failure.failure_class, failure.stage, failure.exit_code) == ("ImagePull", 1, None)
    assert failure.message == "image 'nope' is not known"


def test_a_pod_that_finds_no_place_says_so_in_its_row() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.settle()
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "too little memory"}
    cluster.pod(1)["status"]["conditions"].append(condition)
    cluster.settle()
    assert cluster.status.groups[0].stages[1].message == "too little memory"
    assert cluster.phase() == "Starting"


@pytest.mark.parametrize("seconds", [0.0, SETTLE_SECONDS - 0.1])
def test_consequences_alone_wait_for_the_cause_to_be_seen(seconds: float) -> None:
    cluster = ready_cluster()
    cluster.end_container(0, 71, peer_lost(stage=0, peer=1))
    cluster.advance(seconds)
    planned = cluster.step()
    assert cluster.phase() == "Ready"
    assert planned.requeue_after_seconds == pytest.approx(SETTLE_SECONDS - seconds)
    cluster.end_container(1, 137)
    cluster.step()
    assert (cluster.status.last_failures[0].stage, cluster.status.last_failures[0].failure_class) == (1, "Killed")


def test_a_consequence_is_believed_when_nothing_else_shows() -> None:
    cluster = ready_cluster()
    cluster.end_container(0, 71, peer_lost(stage=0, peer=1))
    cluster.advance(SETTLE_SECONDS)
    cluster.step()
    assert (cluster.status.last_failures[0].stage, cluster.status.last_failures[0].message) == (0, "lost my peer")
    assert cluster.status.last_failures[0].time == START
