"""A pod that the API server refuses: noted and counted under its PipelineModel, and the pass goes on."""

import asyncio
from typing import Any, cast

import pytest

from stageline_api import labels
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop import reconciler
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view.object_cache import ObjectCache

KEY = ModelKey("prod", "chat")


def test_a_refused_pod_is_on_record_and_its_groups_other_pods_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def refuse(_api: object, manifest: dict[str, Any]) -> None:
        asked.append(manifest["metadata"]["name"])
        raise ApiError("exceeded quota: gpus", 403, "Forbidden")

    monkeypatch.setattr(reconciler, "put_object", refuse)
    metrics, nothing = OperatorMetrics(), cast(Any, None)
    made_of = (nothing, ObjectCache(lambda _: None), nothing, nothing, nothing, metrics, nothing, nothing, nothing)
    one = reconciler.Reconciler(*made_of)
    own = {labels.GROUP: "0"}
    pods = [{"kind": "Pod", "metadata": {"name": f"chat-0-1-{stage}", "labels": own}} for stage in range(3)]

    assert asyncio.run(one._make_pods(KEY, "uid", pods)), "there is more to do: to put the refusal on record"
    assert asked == ["chat-0-1-0"]
    assert list(one._refusals.of_model(KEY)) == ["chat-0-1-0"]
    page = metrics.registry.exposition()[0].decode()
    assert f"{names.RECONCILE_ERRORS_TOTAL.name}{{" not in page, (
        "the pass did what it could: StagePending says the rest"
    )
