"""A write that fails is one object's: it holds up the pods that need the object, is said, and is tried again."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from stageline_api import labels
from stageline_api.resource.life.status import GroupStatus, PipelineModelStatus
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.object_writes import NameTakenError, StaleError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop import object_writer
from stageline_operator.controller.loop.object_writer import ObjectWriter
from stageline_operator.controller.loop.refusals import PASSING_SECONDS, Refusals, WriteError
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.planner.types import Deletion, Plan, PlannedEvent

KEY = ModelKey("prod", "chat")
MODEL = {"metadata": {"namespace": "prod", "name": "chat", "uid": "uid"}}
NOW = datetime(2026, 1, 1, tzinfo=UTC)
QUOTA = ApiError("exceeded quota: few", 403, "Forbidden")
WEBHOOK = ApiError('failed calling webhook "pods.example.org"', 500, "InternalError")
SILENCE = ApiError("create pods: no answer within 35 s", 0, "TimeoutError")
TAKEN = NameTakenError("it exists and does not belong to this PipelineModel")
OVERTAKEN = StaleError("another used the quota")
IMMUTABLE = ApiError("spec is immutable", 422, "Invalid")
UNGROWING = ApiError("the storageclass that provisions the pvc must support resize", 403, "Forbidden")
ALL_ERRORS = [QUOTA, WEBHOOK, SILENCE, TAKEN, OVERTAKEN]


class Events:
    """What is said of the model."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def record(self, _: object, event: PlannedEvent) -> None:
        self.said.append((event.reason, event.message))


class Writing:
    """A writer before an API server that fails what the test names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: dict[str, Exception] = {}
        """Errors by name of the object."""
        self.made: list[str] = []
        self.cache, self.events, self.metrics = ObjectCache(), Events(), OperatorMetrics()
        nothing = cast(Any, None)
        events = cast(Any, self.events)
        self.writer = ObjectWriter(nothing, self.cache, nothing, events, self.metrics)
        monkeypatch.setattr(object_writer, "put_object", self._put)
        monkeypatch.setattr(object_writer, "delete_object", self._delete)

    async def _put(self, _: object, manifest: dict[str, Any]) -> dict[str, Any]:
        name = manifest["metadata"]["name"]
        if name in self.fails:
            raise self.fails[name]
        self.made.append(name)
        return manifest | {"metadata": manifest["metadata"] | {"resourceVersion": "1", "uid": name}}

    async def _delete(self, _: object, kind: str, observed: dict[str, Any], __: float | None) -> None:
        name = observed["metadata"]["name"]
        if name in self.fails:
            raise self.fails[name]
        self.made.append(f"no {kind} {name}")

    def carry_out(self, *apply: dict[str, Any], **rest: Any) -> bool:
        status = rest.pop("status", PipelineModelStatus())
        return asyncio.run(self.writer.carry_out(KEY, MODEL, Plan(status, apply=apply, **rest)))


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Writing:
    return Writing(monkeypatch)


def thing(kind: str, name: str) -> dict[str, Any]:
    return {"kind": kind, "apiVersion": "v1", "metadata": {"name": name, "namespace": "prod"}}


def pod(group: int, stage: int = 0) -> dict[str, Any]:
    own = {labels.GROUP: str(group), labels.STAGE: str(stage)}
    made = thing("Pod", f"pod-{group}-{stage}")
    return made | {"metadata": made["metadata"] | {"labels": own}}


CLAIM = thing("PersistentVolumeClaim", "claim-1")
CONFIG = thing("ConfigMap", "config")
NEEDED = {("PersistentVolumeClaim", "claim-1"): frozenset({1}), ("PodDisruptionBudget", "budget"): frozenset[int]()}


@pytest.mark.parametrize("error", ALL_ERRORS, ids=str)
@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "NetworkPolicy", "PodGroup.scheduling.volcano.sh"])
def test_an_object_of_one_group_holds_up_that_group_alone(writing: Writing, kind: str, error: Exception) -> None:
    own = thing(kind.partition(".")[0], "own-1") | {"apiVersion": "scheduling.volcano.sh/v1beta1"}
    writing.fails["own-1"] = error
    writing.carry_out(own, CONFIG, pod(0), pod(1), pod(2), needed_by={(kind, "own-1"): frozenset({1})})
    assert writing.made == ["config", "pod-0-0", "pod-2-0"]


@pytest.mark.parametrize("error", ALL_ERRORS, ids=str)
def test_a_pod_that_can_not_be_made_holds_up_its_group_alone(writing: Writing, error: Exception) -> None:
    writing.fails["pod-0-0"] = error
    writing.carry_out(pod(0), pod(0, 1), pod(1), pod(1, 1))
    assert writing.made == ["pod-1-0", "pod-1-1"]


def test_what_all_pods_need_holds_up_all_and_what_none_needs_holds_up_none(writing: Writing) -> None:
    budget = thing("PodDisruptionBudget", "budget")
    writing.fails = {"config": WEBHOOK, "budget": WEBHOOK}
    writing.carry_out(CONFIG, budget, pod(0), needed_by=NEEDED)
    assert writing.made == []
    del writing.fails["config"]
    writing.writer.forget(KEY)
    writing.carry_out(CONFIG, budget, pod(0), needed_by=NEEDED)
    assert writing.made == ["config", "pod-0-0"]


@pytest.mark.parametrize(("error", "made"), [(QUOTA, ["pod-1-0"]), (IMMUTABLE, []), (UNGROWING, [])], ids=str)
def test_an_object_that_is_there_will_do_unless_it_can_not_become_what_is_wanted(
    writing: Writing, error: Exception, made: list[str]
) -> None:
    writing.cache.put("PersistentVolumeClaim", CLAIM | {"metadata": CLAIM["metadata"] | {"resourceVersion": "7"}})
    writing.fails["claim-1"] = error
    writing.carry_out(CLAIM, pod(1), needed_by=NEEDED)
    assert writing.made == made
    unchangeable = writing.writer.refusals.unchangeable(KEY)
    assert unchangeable == (frozenset() if made else {("PersistentVolumeClaim", "claim-1")})


def test_a_service_that_is_there_will_do_whatever_its_change_is_refused_for(writing: Writing) -> None:
    service = thing("Service", "stages")
    writing.cache.put("Service", service | {"metadata": service["metadata"] | {"resourceVersion": "7"}})
    writing.fails["stages"] = IMMUTABLE
    writing.carry_out(service, pod(0))
    assert writing.made == ["pod-0-0"]


def test_pods_wait_while_a_claim_of_theirs_is_being_deleted(writing: Writing) -> None:
    writing.cache.put("PersistentVolumeClaim", CLAIM | {"metadata": CLAIM["metadata"] | {"resourceVersion": "7"}})
    writing.carry_out(pod(0), pod(1), needed_by=NEEDED, delete=(Deletion("PersistentVolumeClaim", "claim-1"),))
    assert writing.made == ["no PersistentVolumeClaim claim-1", "pod-0-0"]


def test_a_deletion_that_is_refused_hinders_nothing(writing: Writing) -> None:
    writing.cache.put("ConfigMap", CONFIG | {"metadata": CONFIG["metadata"] | {"resourceVersion": "7"}})
    writing.fails["config"] = ApiError("denied the request", 403, "Forbidden")
    writing.carry_out(pod(0), delete=(Deletion("ConfigMap", "config"),))
    assert writing.made == ["pod-0-0"]
    assert "denied the request" in writing.writer.refusals.sentence(KEY, datetime.now(UTC))


@pytest.mark.parametrize("served", [False, True])
def test_a_secret_that_is_refused_may_be_there_when_a_group_served(writing: Writing, served: bool) -> None:
    writing.fails["bus"] = QUOTA
    status = PipelineModelStatus(groups=(GroupStatus(index=0, incarnation=1, served=served),))
    writing.carry_out(thing("Secret", "bus"), pod(0), status=status)
    assert writing.made == (["pod-0-0"] if served else [])


def test_a_namespace_that_is_ending_ends_the_pass(writing: Writing) -> None:
    writing.fails["config"] = ApiError("it is being terminated", 403, "NamespaceTerminating")
    with pytest.raises(ApiError):
        writing.carry_out(CONFIG, pod(0))


def test_what_failed_is_not_tried_at_once_again_and_the_event_says_why(writing: Writing) -> None:
    writing.fails["claim-1"] = QUOTA
    writing.carry_out(CLAIM, needed_by=NEEDED)
    writing.fails.clear()
    assert not writing.carry_out(CLAIM, pod(1), needed_by=NEEDED)
    assert writing.made == []
    assert writing.events.said == [("WriteRefused", "exceeded quota: few")]
    page = writing.metrics.registry.exposition()[0].decode()
    assert 'errors_total{kind="refused",model="chat",namespace="prod"} 1.0' in page


def test_a_refusal_is_told_at_once_and_what_may_pass_when_it_has_lasted() -> None:
    refusals, late = Refusals(), NOW + timedelta(seconds=PASSING_SECONDS)
    at_once: dict[str, WriteError] = {"a": QUOTA, "b": TAKEN}
    for name, error in at_once.items():
        assert refusals.note(KEY, ("ConfigMap", name), name, error, NOW).should_report(NOW)
    refusals.forget(KEY)
    passing: dict[str, WriteError] = {"a": WEBHOOK, "b": SILENCE, "c": OVERTAKEN}
    for name, error in passing.items():
        refusals.note(KEY, ("Pod", name, "0"), name, error, NOW)
        refusals.note(KEY, ("ConfigMap", name), name, error, NOW)
    assert (refusals.pods(KEY, NOW), refusals.sentence(KEY, NOW)) == ({}, "")
    told = refusals.pods(KEY, late)
    assert {name: each.message for name, each in told.items()} == {name: str(each) for name, each in passing.items()}
    assert refusals.sentence(KEY, late) == str(WEBHOOK)


def test_how_long_a_pod_fails_is_counted_over_incarnations_and_the_next_is_tried_at_once() -> None:
    refusals, slot = Refusals(), ("Pod", "0", "1")
    refusals.note(KEY, slot, "chat-0-1-1", WEBHOOK, NOW)
    later = NOW + timedelta(seconds=PASSING_SECONDS)
    assert refusals.note(KEY, slot, "chat-0-1-1", WEBHOOK, later).should_report(later)
    assert refusals.waits(KEY, slot, later)
    refusals.retry_pods(KEY, later)
    assert not refusals.waits(KEY, slot, later)
    refusals.note(KEY, slot, "chat-0-2-1", WEBHOOK, later)
    assert refusals.pods(KEY, later)["chat-0-2-1"].since == NOW


def test_the_wait_is_as_long_as_the_api_server_asks_and_no_other_object_waits_with_it() -> None:
    refusals = Refusals()
    refusals.note(KEY, ("ConfigMap", "a"), "a", ApiError("slow down", 429, "TooManyRequests", 50.0), NOW)
    assert refusals.next_look(KEY, {("ConfigMap", "a")}, NOW) == PASSING_SECONDS, "it is to be told by then"
    assert refusals.waits(KEY, ("ConfigMap", "a"), NOW + timedelta(seconds=49))
    assert not refusals.waits(KEY, ("ConfigMap", "b"), NOW)


def test_what_is_no_longer_wanted_is_forgotten() -> None:
    refusals = Refusals()
    slots = (("ConfigMap", "a"), ("ConfigMap", "b"), ("Pod", "0", "0"), ("Pod", "1", "0"))
    for slot in slots:
        refusals.note(KEY, slot, "name", QUOTA, NOW)
    refusals.keep(KEY, {("ConfigMap", "b")}, {"1"})
    assert [refusals.knows(KEY, slot) for slot in slots] == [False, True, False, True]
