"""How a pass makes pods: several at once, never for long; one that is refused is noted, and the pass goes on."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stageline_api import labels
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop import reconciler
from stageline_operator.controller.process import STUCK_SECONDS
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view.object_cache import ObjectCache

KEY = ModelKey("prod", "chat")


def made_by(metrics: OperatorMetrics) -> reconciler.Reconciler:
    nothing = cast(Any, None)
    cache = ObjectCache(lambda _: None)
    beyond = (nothing,) * 5
    return reconciler.Reconciler(nothing, cache, nothing, nothing, nothing, metrics, *beyond)


def pods_of_one_group(count: int) -> list[dict[str, Any]]:
    own = {labels.GROUP: "0"}
    names_of_stages = (f"chat-0-1-{stage}" for stage in range(count))
    return [{"kind": "Pod", "metadata": {"name": name, "namespace": "prod", "labels": own}} for name in names_of_stages]


def test_pods_of_a_large_model_are_made_several_at_once_and_over_several_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    under_way = most_at_once = 0

    async def make(_api: object, manifest: dict[str, Any]) -> dict[str, Any]:
        nonlocal under_way, most_at_once
        under_way += 1
        most_at_once = max(most_at_once, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        made.append(manifest["metadata"]["name"])
        return manifest

    monkeypatch.setattr(reconciler, "put_object", make)
    monkeypatch.setattr(ObjectCache, "put", lambda *_: None)
    pods, passes = pods_of_one_group(300), 0
    while pods:
        passes += 1
        has_more = asyncio.run(made_by(OperatorMetrics())._make_pods(KEY, "uid", pods))
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

    async def make(_api: object, manifest: dict[str, Any]) -> dict[str, Any]:
        nonlocal now, finished
        finished = max(finished, now + webhook_seconds)
        await asyncio.sleep(0)
        now = finished
        made.append(manifest["metadata"]["name"])
        return manifest

    monkeypatch.setattr(reconciler, "put_object", make)
    monkeypatch.setattr(ObjectCache, "put", lambda *_: None)
    monkeypatch.setattr(reconciler, "time", SimpleNamespace(monotonic=lambda: now))
    assert asyncio.run(made_by(OperatorMetrics())._make_pods(KEY, "uid", pods_of_one_group(4096)))
    assert 0 < len(made) < 4096
    assert now <= STUCK_SECONDS / 2, f"{len(made)} pods in one pass of {now} s"


def test_a_refused_pod_is_on_record_and_its_groups_other_pods_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def refuse(_api: object, manifest: dict[str, Any]) -> None:
        asked.append(manifest["metadata"]["name"])
        raise ApiError("exceeded quota: gpus", 403, "Forbidden")

    monkeypatch.setattr(reconciler, "put_object", refuse)
    metrics = OperatorMetrics()
    one = made_by(metrics)
    pods = pods_of_one_group(3)

    assert asyncio.run(one._make_pods(KEY, "uid", pods)), "there is more to do: to put the refusal on record"
    assert asked == ["chat-0-1-0"]
    assert list(one._refusals.of_model(KEY)) == ["chat-0-1-0"]
    page = metrics.registry.exposition()[0].decode()
    assert f"{names.RECONCILE_ERRORS_TOTAL.name}{{" not in page, (
        "the pass did what it could: StagePending says the rest"
    )
