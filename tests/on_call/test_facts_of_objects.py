"""What is told of a model from its objects alone, with no pod to ask: health, and what each group waits for."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stageline_cli.on_call.bundle.bundle import index_page
from stageline_cli.on_call.bundle.document import as_json, snapshot_document, text_page
from stageline_cli.on_call.facts.facts import EngineFacts, Health, ModelFacts, Snapshot
from stageline_cli.on_call.facts.scrape import Reading
from stageline_cli.on_call.facts.snapshot import build_snapshot
from stageline_cli.on_call.sources.source import ModelObjects
from stageline_cli.on_call.views.status_view import fleet_view, model_view
from stageline_cli.on_call.views.top_view import top_view

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def moment(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    fields = {"type": kind, "status": status, "reason": reason, "message": message}
    return fields | {"lastTransitionTime": moment(-300)}


def stage(index: int, **fields: Any) -> dict[str, Any]:
    return {"index": index, "pod": f"tiny-0-3-{index}"} | fields


def group(phase: str, *stages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    base = {"index": 0, "incarnation": 3, "revision": "abc", "phase": phase, "since": moment(-60)}
    return base | {"stages": list(stages) or [stage(0), stage(1)]} | fields


FAILURE = {
    "time": moment(-20),
    "group": 0,
    "incarnation": 2,
    "stage": 1,
    "container": "stage",
    "failureClass": "OOMKilled",
    "exitCode": 137,
    "message": "the [kernel] killed it",
}


def snapshot_of(*groups: dict[str, Any], is_up: bool = True, spec: Any = None, **status: Any) -> Snapshot:
    manifest = {
        "metadata": {"name": "tiny", "namespace": "lab"},
        "spec": {"model": {"source": "hf://org/tiny"}, "parallelism": {"pipeline": 2}, "replicas": 1} | (spec or {}),
        "status": {"groups": list(groups), "updatedReplicas": 1} | status,
    }
    return build_snapshot("here", [ModelObjects(manifest, is_up=is_up)], Reading(), Reading(), NOW)


def facts_of(*groups: dict[str, Any], **fields: Any) -> ModelFacts:
    return snapshot_of(*groups, **fields).models[0]


READY = group("Ready", stage(0, ready=True, layers="0-1"), stage(1, ready=True, layers="2-3"))
STARTING = group("Starting", stage(0, ready=True), stage(1, reason="Starting", message="prepare: 40 % of 2 GB"))
UNSCHEDULABLE = stage(1, reason="Unschedulable", message="0/3 nodes have an [x] GPU", since=moment(-90))
BACKING_OFF = group("BackingOff", backoffUntil=moment(9), restarts=[moment(-20), moment(-900)])

WAITS = [
    (READY, {}, ""),
    (STARTING, {}, "stage 1, Starting: prepare: 40 % of 2 GB"),
    (
        group("Creating", stage(0, reason="NoPod", message="no pod"), UNSCHEDULABLE),
        {},
        "stage 1, Unschedulable: 0/3 nodes have an [x] GPU (and 1 more)",
    ),
    (BACKING_OFF, {"lastFailures": [FAILURE]}, "its next start in 9 s (after OOMKilled of stage 1)"),
    (group("Waiting", backoffUntil=moment(-1)), {}, "nodes for all of its stages at once; tries again now"),
    (
        group("Failed"),
        {"lastFailures": [FAILURE]},
        "you: it stays down until the template or the annotation stageline.dev/restart changes "
        "(after OOMKilled of stage 1)",
    ),
    (group("Terminating"), {}, "its pods to end"),
    (group("Draining"), {}, "its pods to end, then is gone"),
    (group("Replacing"), {}, "its pods to end, then restarts with the changed template"),
    (group("SomethingNew"), {}, ""),
]


@pytest.mark.parametrize(("one", "status", "words"), WAITS, ids=[case[0]["phase"] for case in WAITS])
def test_what_a_group_waits_for(one: dict[str, Any], status: dict[str, Any], words: str) -> None:
    assert facts_of(one, **status).groups[0].waits_for == words


STARTS = [condition("Progressing", "True", "GroupsStarting")]
DEGRADED = [condition("Degraded", "True", "RestartBudgetSpent")]
TWO = {"replicas": 2}

HEALTHS: list[tuple[list[dict[str, Any]], dict[str, Any], Health]] = [
    ([READY], {}, Health.HEALTHY),
    ([READY], {"spec": TWO}, Health.DEGRADED),
    ([READY], {"conditions": DEGRADED}, Health.DEGRADED),
    ([STARTING], {"conditions": STARTS}, Health.STARTING),
    ([STARTING | {"restarts": [moment(-20)]}], {"conditions": STARTS}, Health.DOWN),
    ([BACKING_OFF], {"conditions": [condition("Progressing", "True", "BackingOff")]}, Health.DOWN),
    ([group("Failed")], {"conditions": DEGRADED}, Health.DOWN),
    ([], {}, Health.DOWN),
    ([], {"spec": {"suspend": True}}, Health.SUSPENDED),
    ([READY], {"is_up": False}, Health.ENDED),
]


@pytest.mark.parametrize(("groups", "fields", "health"), HEALTHS)
def test_a_model_in_one_word(groups: list[dict[str, Any]], fields: dict[str, Any], health: Health) -> None:
    assert facts_of(*groups, **fields).health is health


def test_restarts_count_within_the_window_only() -> None:
    found = facts_of(BACKING_OFF, spec={"restart": {"maxRestarts": 2, "windowSeconds": 600}}).groups[0]
    assert (found.restarts_in_window, found.max_restarts, found.restart_window_seconds) == (1, 2, 600)


def test_a_newer_operators_fields_are_no_trouble() -> None:
    found = facts_of(READY, spec={"restart": {"maxRestarts": 2, "newField": 1}}, newStatus={"a": 1})
    assert found.groups[0].max_restarts == 2, "what this version knows of the policy holds"
    of_another = {**FAILURE, "failureClass": "CosmicRay"}
    found = facts_of(READY, lastFailures=[of_another, FAILURE])
    assert ([one.phase for one in found.groups], len(found.failures)) == (["Ready"], 1)


def test_the_rank_of_a_stage_that_failed_is_told_with_it() -> None:
    waiting = snapshot_of(BACKING_OFF, lastFailures=[FAILURE | {"rank": 1}])
    page = text_page(model_view(waiting, waiting.models[0], wide=True))
    assert "group 0 incarnation 2 stage 1, rank 1 stage: OOMKilled" in page, page
    assert "(after OOMKilled of stage 1, rank 1)" in page, page
    assert snapshot_document(waiting)["models"][0]["failures"][0]["rank"] == 1
    assert "- last failure: group 0 incarnation 2 stage 1, rank 1, OOMKilled: " in index_page(waiting, {}, {})
    alone = snapshot_of(BACKING_OFF, lastFailures=[FAILURE])
    assert "rank" not in text_page(model_view(alone, alone.models[0], wide=True))


def test_every_view_shows_the_same_facts_and_takes_words_literally() -> None:
    snapshot = snapshot_of(group("Starting", stage(0, ready=True, layers="0-1"), UNSCHEDULABLE), lastFailures=[FAILURE])
    page = text_page(model_view(snapshot, snapshot.models[0], wide=True))
    for words in (
        "0/3 nodes have an [x] GPU (for 90 s)",
        "OOMKilled, exit status 137: the [kernel] killed it",
        "20 s ago",
    ):
        assert words in page, page
    assert "0/3 nodes have an [x] GPU" in text_page(top_view(snapshot, 80))
    fleet = text_page(fleet_view(snapshot, wide=True))
    assert "1 Starting" in fleet, fleet
    assert "lab" in fleet
    document = snapshot_document(snapshot)
    assert document["models"][0]["failures"][0]["failure_class"] == "OOMKilled"
    assert document["models"][0]["groups"][0]["stages"][1]["waiting_since"] == moment(-90)
    assert '"health": "Down"' in as_json(document)


def test_top_tells_how_many_drafts_hold_where_some_are_made() -> None:
    snapshot = snapshot_of(READY)
    (model,) = snapshot.models
    quiet = EngineFacts("Ready", 1, 0, 0.5, 12.0, 0)
    for engine, told in (
        (replace(quiet, draft_acceptance=0.75, tokens_per_drafted_row=3.25), True),
        (quiet, False),
    ):
        group = replace(model.groups[0], engine=engine)
        shown = text_page(top_view(replace(snapshot, models=(replace(model, groups=(group,)),)), 200))
        assert ("drafts 75 % accepted, 3.2 tokens a drafted row" in " ".join(shown.split())) == told, shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_stage_is_lost_on_a_narrow_terminal(width: int) -> None:
    shown = text_page(top_view(snapshot_of(READY), width))
    assert "0-1" in shown
    assert "2-3" in shown
