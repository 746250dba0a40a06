"""The stages' state clocks as PromQL: busy share, bubble, bottleneck and imbalance, as docs/metrics.md defines them.

Every stage is in exactly one state at any time; busy, wait and idle seconds sum to those of its clock.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from board_builder.panels import Limits
from board_builder.queries import rate_by
from stageline_runtime import metric_names as names
from stageline_runtime.stage.telemetry.state_clock import BusyKind, WaitReason

BUSY: Final = Limits(0.8, 0.95)
"""Of a stage's time: from where on alerts call it a bottleneck, and where nothing more fits in."""
UNEVEN: Final = Limits(1.25, 1.5)
"""Times the mean of a group's stages; the first is where an alert speaks of an uneven cut."""
GROUP: Final = ("cluster", "namespace", "model", "group")
STAGE: Final = (*GROUP, "stage")
BUSY_COLORS: Final[Mapping[BusyKind, str]] = {
    BusyKind.PREFILL: "light-orange",
    BusyKind.DECODE: "orange",
    BusyKind.MIXED: "dark-orange",
    BusyKind.DRAFT: "yellow",
    BusyKind.DUMMY: "red",
}
"""Warm is who works; a dummy step is work for nothing."""
WAIT_COLORS: Final[Mapping[WaitReason, str]] = {
    WaitReason.RECV: "blue",
    WaitReason.FEEDBACK: "light-blue",
    WaitReason.SEND: "dark-blue",
    WaitReason.HOST: "purple",
    WaitReason.STARVED: "super-light-blue",
}
"""Cold is who waits, and for whom nobody else does."""


def busy(labels: Sequence[str], *matchers: str) -> str:
    """Share of the time spent computing, dummy steps included."""
    return _of_wall(labels, names.STAGE_BUSY.name, *matchers)


def waiting(labels: Sequence[str], *matchers: str) -> str:
    """Share of the time spent waiting while work was outstanding."""
    return _of_wall(labels, names.STAGE_WAIT.name, *matchers)


def idle(labels: Sequence[str], *matchers: str) -> str:
    """Share of the time in which no request was unfinished."""
    return _of_wall(labels, names.STAGE_IDLE.name, *matchers)


def bubble(labels: Sequence[str], *matchers: str) -> str:
    """(wait + dummy) / (busy + wait); nothing where no work was outstanding."""
    dummy = rate_by(labels, names.STAGE_BUSY.name, 'kind="dummy"', *matchers)
    wait = rate_by(labels, names.STAGE_WAIT.name, *matchers)
    worked = rate_by(labels, names.STAGE_BUSY.name, *matchers)
    return f"({wait} + ({dummy} or 0 * {wait})) / ({worked} + {wait} > 0)"


def _of_wall(labels: Sequence[str], state: str, *matchers: str) -> str:
    """Of all the time that the stages' clocks ran, also where scrapes were missed or two incarnations overlap."""
    return f"{rate_by(labels, state, *matchers)} / ({rate_by(labels, names.STAGE_WALL.name, *matchers)} > 0)"


def imbalance(*matchers: str) -> str:
    """Each stage's busy share as a multiple of the mean of its group's."""
    each = f"({busy(STAGE, *matchers)})"
    group = ", ".join(GROUP)
    return f"{each} / on ({group}) group_left () (avg by ({group}) {each} > 0)"


def busiest(expr: str, *matchers: str) -> str:
    """Of an expression by stage, the busiest stage of each group; nothing for groups that compute nothing."""
    chosen = f"topk by ({', '.join(GROUP)}) (1, ({busy(STAGE, *matchers)}) > 0)"
    return f"({expr}) and on ({', '.join(STAGE)}) {chosen}"


def states(labels: Sequence[str], *matchers: str) -> tuple[tuple[str, str, str], ...]:
    """(name, share of the time, color) of what a stage can be doing.

    Warm is who works: in a pipeline that stands, the stage that the others wait for stands out, not those that wait.
    """
    return (
        ("busy", busy(labels, *matchers), "orange"),
        ("wait", waiting(labels, *matchers), "blue"),
        ("idle", idle(labels, *matchers), "gray"),
    )
