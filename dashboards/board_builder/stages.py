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
"""Shares of a stage's time: the alert's threshold of a bottleneck, and full use."""
UNEVEN: Final = Limits(1.25, 1.5)
"""Multiples of the mean of a group's stages; the first is the alert's threshold of an uneven cut."""
GROUP: Final = ("cluster", "namespace", "model", "group")
STAGE: Final = (*GROUP, "stage")
BUSY_COLORS: Final[Mapping[BusyKind, str]] = {
    BusyKind.PREFILL: "light-orange",
    BusyKind.DECODE: "orange",
    BusyKind.MIXED: "dark-orange",
    BusyKind.DRAFT: "yellow",
    BusyKind.DUMMY: "red",
}
"""Warm colors are work; a dummy step is useless work."""
WAIT_COLORS: Final[Mapping[WaitReason, str]] = {
    WaitReason.RECV: "blue",
    WaitReason.FEEDBACK: "light-blue",
    WaitReason.SEND: "dark-blue",
    WaitReason.HOST: "purple",
    WaitReason.STARVED: "super-light-blue",
}
"""Cold colors are waits."""


def busy(labels: Sequence[str], *matchers: str) -> str:
    """Share of the time spent computing, including dummy steps."""
    return _of_wall(labels, names.STAGE_BUSY.name, *matchers)


def waiting(labels: Sequence[str], *matchers: str) -> str:
    """Share of the time spent waiting while work was outstanding."""
    return _of_wall(labels, names.STAGE_WAIT.name, *matchers)


def idle(labels: Sequence[str], *matchers: str) -> str:
    """Share of the time without an unfinished request."""
    return _of_wall(labels, names.STAGE_IDLE.name, *matchers)


def bubble(labels: Sequence[str], *matchers: str) -> str:
    """(wait + dummy) / (busy + wait); no sample without outstanding work."""
    dummy = rate_by(labels, names.STAGE_BUSY.name, 'kind="dummy"', *matchers)
    wait = rate_by(labels, names.STAGE_WAIT.name, *matchers)
    worked = rate_by(labels, names.STAGE_BUSY.name, *matchers)
    return f"({wait} + ({dummy} or 0 * {wait})) / ({worked} + {wait} > 0)"


def _of_wall(labels: Sequence[str], state: str, *matchers: str) -> str:
    """Share of the total time of the stages' clocks, also if scrapes were missed or two incarnations overlap."""
    return f"{rate_by(labels, state, *matchers)} / ({rate_by(labels, names.STAGE_WALL.name, *matchers)} > 0)"


def imbalance(*matchers: str) -> str:
    """Each stage's busy share as a multiple of its group's mean."""
    each = f"({busy(STAGE, *matchers)})"
    group = ", ".join(GROUP)
    return f"{each} / on ({group}) group_left () (avg by ({group}) {each} > 0)"


def busiest(expr: str, *matchers: str) -> str:
    """The busiest stage of each group in an expression by stage; no sample for groups that compute nothing."""
    chosen = f"topk by ({', '.join(GROUP)}) (1, ({busy(STAGE, *matchers)}) > 0)"
    return f"({expr}) and on ({', '.join(STAGE)}) {chosen}"


def states(labels: Sequence[str], *matchers: str) -> tuple[tuple[str, str, str], ...]:
    """(name, share of the time, color) of the states of a stage.

    Warm colors are work: if the pipeline is stuck, the stage that the others wait for stands out.
    """
    return (
        ("busy", busy(labels, *matchers), "orange"),
        ("wait", waiting(labels, *matchers), "blue"),
        ("idle", idle(labels, *matchers), "gray"),
    )
