"""A few seconds of a pipeline as lanes of columns: what part of each column a stage was busy, and what part it waited.

Marks are the stages' own, so that the picture is the counters' truth; what is neither busy nor waiting is idle. The
picture has the same size however many plans ran.

Timelines are read of groups that somebody looks at, however many look: each group at most every half second. Only the
last seconds are kept. A group that nobody has looked at for a minute is forgotten, and with it its steps. Drawing takes
tens of milliseconds for each stage of a quick pipeline: it is done in a thread, one picture of a group at a time.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from stageline_api.endpoints import GroupEndpoint
from stageline_api.telemetry.timeline import (
    BUSY_PREFIX,
    WAIT_PREFIX,
    GroupClocks,
    GroupStages,
    StageEndpoint,
    TimelineMark,
    TimelinePage,
)
from stageline_gateway.engine_client.engine_calls import EngineCalls
from stageline_gateway.groups.routing import identity

COLUMNS: Final = 240
DUMMY: Final = BUSY_PREFIX + "dummy"
_PER_SECOND: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class StageMarks:
    stage: int
    marks: Sequence[TimelineMark]
    """In time order, in the stage's clock."""
    now_nanoseconds: int
    """Until when it has marks."""
    offset_nanoseconds: int
    """Stage's clock minus engine's."""


@dataclass(slots=True)
class Lane:
    """One stage's columns, each with its nanoseconds of busy and waiting, and all its seconds by state."""

    busy: list[int] = field(default_factory=lambda: [0] * COLUMNS)
    wait: list[int] = field(default_factory=lambda: [0] * COLUMNS)
    by_state: Counter[str] = field(default_factory=Counter)

    def add(self, state: str, begin: int, end: int, column_nanoseconds: int) -> None:
        """Add time that the stage spent in `state`; `begin` and `end` are since the window's beginning."""
        self.by_state[state] += end - begin
        if state.startswith(BUSY_PREFIX):
            column_of = self.busy
        elif state.startswith(WAIT_PREFIX):
            column_of = self.wait
        else:
            return
        for column in range(begin // column_nanoseconds, min(COLUMNS, -(-end // column_nanoseconds))):
            left, right = column * column_nanoseconds, (column + 1) * column_nanoseconds
            column_of[column] += max(0, min(end, right) - max(begin, left))


def lane(stage: StageMarks, begin: int, end: int) -> Lane:
    drawn = Lane()
    column_nanoseconds = max(1, (end - begin) // COLUMNS)
    last = TimelineMark("", "", stage.now_nanoseconds)
    for mark, following in pairwise([*stage.marks, last]):
        first = max(begin, mark.at_nanoseconds - stage.offset_nanoseconds) - begin
        until = min(end, following.at_nanoseconds - stage.offset_nanoseconds) - begin
        if first < until:
            drawn.add(mark.state, first, until, column_nanoseconds)
    return drawn


def picture(stages: Sequence[StageMarks], window_seconds: float) -> dict[str, Any]:
    """The last `window_seconds` for which all of `stages` have marks. Columns are percents."""
    end = min(one.now_nanoseconds - one.offset_nanoseconds for one in stages)
    begin = end - int(window_seconds * _PER_SECOND)
    column_nanoseconds = max(1, (end - begin) // COLUMNS)
    lanes = [(one.stage, lane(one, begin, end)) for one in stages]
    return {
        "window_seconds": window_seconds,
        "until_seconds": end / _PER_SECOND,
        "bubble_ratio": bubble_ratio(drawn for _, drawn in lanes),
        "stages": [
            {
                "stage": stage,
                "busy": [round(100 * part / column_nanoseconds) for part in drawn.busy],
                "wait": [round(100 * part / column_nanoseconds) for part in drawn.wait],
                "seconds": {state: round(spent / _PER_SECOND, 4) for state, spent in sorted(drawn.by_state.items())},
            }
            for stage, drawn in lanes
        ],
    }


def bubble_ratio(lanes: Iterable[Lane]) -> float | None:
    """(wait + dummy) / (busy + wait) over all lanes, dummy being part of busy; None when no work was outstanding."""
    wasted = active = 0
    for one in lanes:
        for state, spent in one.by_state.items():
            waits = state.startswith(WAIT_PREFIX)
            wasted += spent if waits or state == DUMMY else 0
            active += spent if waits or state.startswith(BUSY_PREFIX) else 0
    return round(wasted / active, 4) if active else None


REREAD_SECONDS: Final = 0.5
FORGET_SECONDS: Final = 60.0
MOST_WINDOW_SECONDS: Final = 10.0
MAX_MARKS: Final = 50_000
"""Of one stage: ten seconds of a thousand plans a second with five states each."""
MAX_DRAWN: Final = 8
"""Pictures of a group that are kept, for whoever else asks for the same."""
MAX_PAGES: Final = 32
"""Read at once; a stage holds 16."""


class NoPictureError(Exception):
    """There is nothing to draw yet, with a sentence about why."""


@dataclass(slots=True)
class _Stage:
    since_seq: int = -1
    marks: deque[TimelineMark] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))
    open_marks: tuple[TimelineMark, ...] = ()
    now_nanoseconds: int = 0

    def take(self, page: TimelinePage) -> None:
        """Add a page's steps and drop what no window reaches any more."""
        for step in page.steps:
            self.marks.extend(step.marks)
            self.since_seq = step.seq
        self.open_marks, self.now_nanoseconds = page.open_marks, page.now_nanoseconds
        oldest = page.now_nanoseconds - int(2 * MOST_WINDOW_SECONDS * 1e9)
        while len(self.marks) > 1 and self.marks[1].at_nanoseconds < oldest:
            self.marks.popleft()


@dataclass(slots=True)
class _Watch:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    read_at: float = float("-inf")
    looked_at: float = 0.0
    stages: dict[int, _Stage] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    drawn: dict[float, dict[str, Any]] = field(default_factory=dict)
    """By window, since the last reading."""

    def picture(self, window_seconds: float) -> dict[str, Any]:
        marks = [
            StageMarks(stage, (*kept.marks, *kept.open_marks), kept.now_nanoseconds, self.offsets[stage])
            for stage, kept in sorted(self.stages.items())
        ]
        return picture(marks, window_seconds)


class PipelineWatch:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watches: dict[str, _Watch] = {}

    async def picture(self, calls: EngineCalls, group: GroupEndpoint, window_seconds: float) -> dict[str, Any]:
        """The last `window_seconds` of `group`, asked by `calls`.

        Raises:
            ApiError: its engine or a stage does not answer.
            NoPictureError: its stages are not all there, or their clocks were not compared yet.
        """
        watch = self._watch(identity(group))
        async with watch.lock:
            if self._clock() - watch.read_at >= REREAD_SECONDS:
                await self._read(calls, group, watch)
                watch.read_at = self._clock()
                watch.drawn.clear()
            if window_seconds not in watch.drawn:
                drawn = await asyncio.to_thread(watch.picture, min(window_seconds, MOST_WINDOW_SECONDS))
                if len(watch.drawn) >= MAX_DRAWN:
                    watch.drawn.clear()
                watch.drawn[window_seconds] = drawn
            return watch.drawn[window_seconds]

    def _watch(self, key: str) -> _Watch:
        now = self._clock()
        self._watches = {
            name: one for name, one in self._watches.items() if name == key or now - one.looked_at < FORGET_SECONDS
        }
        watch = self._watches.setdefault(key, _Watch())
        watch.looked_at = now
        return watch

    async def _read(self, calls: EngineCalls, group: GroupEndpoint, watch: _Watch) -> None:
        stages = await calls.get(f"{group.url}/stages", GroupStages.model_validate_json, tls_name=group.tls_name)
        if stages.incarnation != group.incarnation or len(stages.stages) < stages.stage_count:
            raise NoPictureError("The group's stages are not all connected.")
        clocks = await calls.get(f"{group.url}/clock", GroupClocks.model_validate_json, tls_name=group.tls_name)
        watch.offsets = _offsets(stages, clocks)
        kept = [watch.stages.setdefault(endpoint.stage, _Stage()) for endpoint in stages.stages]
        reading = (self._read_stage(calls, endpoint, one) for endpoint, one in zip(stages.stages, kept, strict=True))
        await asyncio.gather(*reading)

    async def _read_stage(self, calls: EngineCalls, endpoint: StageEndpoint, kept: _Stage) -> None:
        for _ in range(MAX_PAGES):
            url = f"{endpoint.health_url}/timeline?since_seq={kept.since_seq}"
            page = await calls.get(url, TimelinePage.model_validate_json, is_engine=False)
            kept.take(page)
            if not page.more:
                return


def _offsets(stages: GroupStages, clocks: GroupClocks) -> dict[int, int]:
    """Each stage's clock minus the engine's; stage 0's machine is the engine's, and one machine has one clock."""
    compared = {one.stage: one.offset_nanoseconds for one in clocks.stages}
    here = stages.stages[0].host
    offsets = {one.stage: 0 if one.host == here else compared.get(one.stage) for one in stages.stages}
    if None in offsets.values():
        raise NoPictureError("The stages' clocks have not been compared yet.")
    return {stage: offset for stage, offset in offsets.items() if offset is not None}
