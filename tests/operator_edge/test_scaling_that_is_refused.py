"""A number of groups that the API server does not take is said on the model: a refusal at once, an outage in time."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop import autoscaler
from stageline_operator.controller.loop.autoscaler import Autoscaler
from stageline_operator.controller.loop.refusals import PASSING_SECONDS
from stageline_operator.controller.settings import OperatorSettings
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.planner.autoscaling import Scaling
from stageline_operator.planner.types import PlannedEvent

KEY = ModelKey("prod", "chat")
MODEL = {"metadata": {"namespace": "prod", "name": "chat", "uid": "uid"}}
START = datetime(2026, 1, 1, tzinfo=UTC)
REFUSED = ApiError("patch pipelinemodels chat scale: 403 Forbidden", 403, "Forbidden")
DENIED = ApiError("admission webhook denied the request", 400, "BadRequest")
DEAD = ApiError("failed calling webhook", 500, "InternalError")
TEST_FAILED = ApiError("the server rejected our request", 422, "Invalid")


class Clock:
    """Stands for `datetime`, at a moment that the test sets."""

    moment = START

    @classmethod
    def now(cls, _: object) -> datetime:
        return cls.moment


class Refusing:
    """An API server and a recorder of Events."""

    def __init__(self, error: ApiError) -> None:
        self.error = error
        self.said: list[str] = []

    async def patch(self, *_: object) -> None:
        raise self.error

    def record(self, _: object, event: PlannedEvent) -> None:
        self.said.append(event.reason)


@pytest.mark.parametrize(
    ("error", "at_once", "later"),
    [
        (REFUSED, ["ScaleRefused"], ["ScaleRefused"] * 2),
        (DENIED, ["ScaleRefused"], ["ScaleRefused"] * 2),
        (DEAD, [], ["ScaleRefused"]),
        (TEST_FAILED, [], []),
    ],
    ids=str,
)
def test_scaling_that_is_refused_is_said(
    monkeypatch: pytest.MonkeyPatch, error: ApiError, at_once: list[str], later: list[str]
) -> None:
    monkeypatch.setattr(autoscaler, "datetime", Clock)
    monkeypatch.setattr(Clock, "moment", START)
    both = Refusing(error)
    one = Autoscaler(OperatorSettings("image", "me"), cast(Any, both), ObjectCache(), cast(Any, both), cast(Any, None))
    asyncio.run(one._scale(KEY, MODEL, 1, Scaling(2, "busy")))
    assert both.said == at_once
    monkeypatch.setattr(Clock, "moment", START + timedelta(seconds=PASSING_SECONDS))
    asyncio.run(one._scale(KEY, MODEL, 1, Scaling(2, "busy")))
    assert both.said == later
