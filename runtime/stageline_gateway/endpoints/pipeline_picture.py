"""A few seconds of a pipeline as lanes of columns: what part of each column a stage was busy, and what part it waited.

Marks are the stages' own, so that the picture is the counters' truth; what is neither busy nor waiting is idle. The
picture has the same size however many plans ran. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from stageline_api.telemetry.timeline import BUSY_PREFIX, WAIT_PREFIX, TimelineMark

COLUMNS: Final = 240
DUMMY: Final = BUSY_PREFIX + "dummy"
_PER_SECOND: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class StageMarks:
    """What one stage told."""

    stage: int
    marks: Sequence[TimelineMark]
    """In time order, in the stage's clock."""
    now_nanoseconds: int
    """Until when it told."""
    offset_nanoseconds: int
    """Stage's clock minus engine's."""


@dataclass(slots=True)
class Lane:
    """One stage's columns, each with its nanoseconds of busy and waiting, and all its seconds by state."""

    busy: list[int] = field(default_factory=lambda: [0] * COLUMNS)
    wait: list[int] = field(default_factory=lambda: [0] * COLUMNS)
    by_state: Counter[str] = field(default_factory=Counter)

    def add(self, state: str, begin: int, end: int, column_nanoseconds: int) -> None:
        """The stage was in `state` from `begin` to `end`, counted from the window's beginning."""
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
    """The lane of `stage` between two moments of the engine's clock, in nanoseconds."""
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
    """The last `window_seconds` that all of `stages` have told of. Columns are percents."""
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
