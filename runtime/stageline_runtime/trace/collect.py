"""Reads the timelines of a running group over HTTP: where the stages are from the engine, steps from each stage.

A stage's ring holds its last few thousand steps, so it is read again and again while the trace runs. Reading asks for
one page at a time, each small enough not to disturb the stage.
"""

import time
from typing import Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from stageline_api.errors import UserError
from stageline_api.telemetry.timeline import (
    GroupClocks,
    GroupStages,
    StageEndpoint,
    TimelineMark,
    TimelinePage,
    TimelineStep,
)
from stageline_runtime.trace.lanes import StageTimeline

REREAD_SECONDS: Final = 0.5
TIMEOUT_SECONDS: Final = 10.0

Model = TypeVar("Model", bound=BaseModel)


class StageReader:
    """Keeps what one stage has told so far."""

    def __init__(self, http: httpx.Client, endpoint: StageEndpoint, incarnation: int) -> None:
        self._http = http
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._steps: list[TimelineStep] = []
        self._missed = 0
        self._open: tuple[TimelineMark, ...] = ()
        self._now = 0

    def read(self) -> int:
        """Take in all steps there are by now; returns the stage's clock.

        Raises:
            UserError: the stage doesn't answer, or belongs to another incarnation by now.
        """
        while True:
            page = self._page()
            if page.steps and self._steps:
                self._missed += page.steps[0].seq - self._steps[-1].seq - 1
            self._steps += page.steps
            self._open, self._now = page.open_marks, page.now_nanoseconds
            if not page.more:
                return self._now

    def timeline(self, offset_nanoseconds: int, error_nanoseconds: int) -> StageTimeline:
        return StageTimeline(
            stage=self._endpoint.stage,
            steps=tuple(self._steps),
            open_marks=self._open,
            now_nanoseconds=self._now,
            offset_nanoseconds=offset_nanoseconds,
            error_nanoseconds=error_nanoseconds,
            missed_steps=self._missed,
        )

    def _page(self) -> TimelinePage:
        since = self._steps[-1].seq if self._steps else -1
        url = f"{self._endpoint.health_url}/timeline?since_seq={since}"
        page = _get(self._http, url, TimelinePage, f"stage {self._endpoint.stage}")
        if page.incarnation != self._incarnation:
            raise UserError(
                f"stage {self._endpoint.stage} is of incarnation {page.incarnation}, not {self._incarnation}: "
                "the group was replaced while it was traced"
            )
        return page


def read_stages(http: httpx.Client, engine_url: str) -> GroupStages:
    """Where the group's stages are; raises UserError when they are not all connected."""
    stages = _get(http, f"{engine_url}/stages", GroupStages, "the engine")
    missing = sorted(set(range(stages.stage_count)) - {one.stage for one in stages.stages})
    if missing:
        names = ", ".join(map(str, missing))
        raise UserError(f"stage {names} of {stages.served_name} is not connected; try again once the group is ready")
    return stages


def collect(http: httpx.Client, engine_url: str, seconds: float) -> tuple[GroupStages, list[StageTimeline], int | None]:
    """Watch a group for `seconds`; 0 takes what the stages hold now.

    Returns the group, the timelines in stage order, and the moment on the engine's clock at which watching began
    (None for 0 seconds: all that is held counts).

    Raises:
        UserError: engine or stage don't answer, the group was replaced, or a clock has not been compared yet.
    """
    group = read_stages(http, engine_url)
    readers = [StageReader(http, endpoint, group.incarnation) for endpoint in group.stages]
    began = [reader.read() for reader in readers]
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(REREAD_SECONDS, left))
        for reader in readers:
            reader.read()
    clocks = _offsets(group, _get(http, f"{engine_url}/clock", GroupClocks, "the engine"))
    timelines = [reader.timeline(*clocks[one.stage]) for reader, one in zip(readers, group.stages, strict=True)]
    begin = max(now - one.offset_nanoseconds for now, one in zip(began, timelines, strict=True))
    return group, timelines, begin if seconds > 0 else None


def _offsets(group: GroupStages, clocks: GroupClocks) -> dict[int, tuple[int, int]]:
    """(offset, error) by stage, in nanoseconds. The engine's machine is stage 0's, and one machine has one clock."""
    compared = {one.stage: (one.offset_nanoseconds, one.error_nanoseconds) for one in clocks.stages}
    for endpoint in group.stages:
        if endpoint.host == group.stages[0].host:
            compared[endpoint.stage] = (0, 0)
    unknown = [one.stage for one in group.stages if one.stage not in compared]
    if unknown:
        raise UserError(f"the clock of stage {unknown[0]} has not been compared yet; try again in a few seconds")
    return compared


def _get(http: httpx.Client, url: str, model: type[Model], who: str) -> Model:
    try:
        answer = http.get(url, timeout=TIMEOUT_SECONDS)
        answer.raise_for_status()
        return model.model_validate_json(answer.content)
    except httpx.HTTPStatusError as error:
        raise UserError(f"{who} answered {url} with status {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise UserError(f"{who} does not answer at {url}: {error or type(error).__name__}") from error
    except ValidationError as error:
        raise UserError(f"{who} answered {url} with something else than a {model.__name__}") from error
