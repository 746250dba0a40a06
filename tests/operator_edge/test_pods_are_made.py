"""How a pass makes pods: several at once, never for long; one that is refused is noted, and the pass goes on."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stageline_api import labels
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop import object_writer
from stageline_operator.controller.loop.object_writer import ObjectWriter
from stageline_operator.controller.process import STUCK_SECONDS
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.planner.types import Plan

KEY = ModelKey("prod", "chat")


MODEL = {"metadata": {"namespace": "prod", "name": "chat", "uid": "uid"}}


def writer(metrics: OperatorMetrics | None = None) -> ObjectWriter:
    nothing = cast(Any, None)
    return ObjectWriter(nothing, ObjectCache(), nothing, nothing, metrics or OperatorMetrics())


def make(one: ObjectWriter, pods: list[dict[str, Any]]) -> bool:
    return asyncio.run(one.carry_out(KEY, MODEL, Plan(PipelineModelStatus(), apply=tuple(pods))))


def pods_of_one_group(count: int) -> list[dict[str, Any]]:
    return [pod(0, stage) for stage in range(count)]


def pod(group: int, stage: int) -> dict[str, Any]:
    own = {labels.GROUP: str(group), labels.STAGE: str(stage)}
    return {"kind": "Pod", "metadata": {"name": f"chat-{group}-1-{stage}", "namespace": "prod", "labels": own}}


def test_pods_of_a_large_model_are_made_several_at_once_and_over_several_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    under_way = most_at_once = 0

    async def admit(_api: object, manifest: dict[str, Any]) -> dict[str, Any]:
        nonlocal under_way, most_at_once
        under_way += 1
        most_at_once = max(most_at_once, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        made.append(manifest["metadata"]["name"])
        return manifest

    monkeypatch.setattr(object_writer, "put_object", admit)
    monkeypatch.setattr(ObjectCache, "put", lambda *_: None)
    pods, passes = pods_of_one_group(300), 0
    while pods:
        passes += 1
        has_more = make(writer(), pods)
        pods = [each for each in pods if each["metadata"]["name"] not in made]
        assert has_more == bool(pods)
    assert (len(made), len(set(made))) == (300, 300)
    assert passes > 1
    assert 4 <= most_at_once <= 32, most_at_once


@pytest.mark.parametrize("webhook_seconds", [1.0, 10.0, 30.0])
def test_however_long_each_pod_takes_a_pass_ends_before_the_operator_is_taken_for_stuck(
    monkeypatch: pytest.MonkeyPatch, webhook_seconds: float
) -> None:
    """Admission webhooks may take up to 30 s, and those made at once take their time together."""
    now, finished = 0.0, 0.0
    made: list[str] = []

    async def admit(_api: object, manifest: dict[str, Any]) -> dict[str, Any]:
        nonlocal now, finished
        finished = max(finished, now + webhook_seconds)
        await asyncio.sleep(0)
        now = finished
        made.append(manifest["metadata"]["name"])
        return manifest

    monkeypatch.setattr(object_writer, "put_object", admit)
    monkeypatch.setattr(ObjectCache, "put", lambda *_: None)
    monkeypatch.setattr(object_writer, "time", SimpleNamespace(monotonic=lambda: now))
    one, pods = writer(), pods_of_one_group(4096)
    assert make(one, pods)
    assert 0 < len(made) < 4096
    assert now <= STUCK_SECONDS / 2, f"{len(made)} pods in one pass of {now} s"
    for passes in range(2, 8):
        before = len(made)
        assert make(one, pods[before:])
        assert now <= passes * STUCK_SECONDS / 2, f"{len(made)} pods in {passes} passes of {now} s"
    assert len(made) - before >= 16, "later passes begin with as many at once as earlier ones ended with"


def test_a_refused_pod_is_on_record_and_its_groups_other_pods_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def refuse(_api: object, manifest: dict[str, Any]) -> None:
        asked.append(manifest["metadata"]["name"])
        raise ApiError("exceeded quota: gpus", 403, "Forbidden")

    monkeypatch.setattr(object_writer, "put_object", refuse)
    metrics = OperatorMetrics()
    one = writer(metrics)
    pods = pods_of_one_group(3)

    assert make(one, pods), "there is more to do: to put the refusal on record"
    assert asked == ["chat-0-1-0"]
    assert list(one.refusals.pods(KEY, datetime.now(UTC))) == ["chat-0-1-0"]
    page = metrics.registry.exposition()[0].decode()
    assert f"{names.RECONCILE_ERRORS_TOTAL.name}{{" not in page, (
        "the pass did what it could: StagePending says the rest"
    )
