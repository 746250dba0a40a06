"""Groups by phase, in the same colors on every board: green serves, blue is in progress, red needs action."""

from collections.abc import Mapping
from typing import Final

from board_builder.panels import Series
from board_builder.queries import current, sum_by
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.planner.types import GroupPhase

COLORS: Final[Mapping[GroupPhase, str]] = {
    GroupPhase.READY: "green",
    GroupPhase.CREATING: "light-blue",
    GroupPhase.STARTING: "blue",
    GroupPhase.REPLACING: "purple",
    GroupPhase.DRAINING: "gray",
    GroupPhase.WAITING: "yellow",
    GroupPhase.TERMINATING: "light-orange",
    GroupPhase.BACKING_OFF: "orange",
    GroupPhase.FAILED: "red",
}


def groups_by_phase(*matchers: str) -> Series:
    """How many groups are in each phase."""
    by_phase = current(("cluster", "namespace", "model", "phase"), names.GROUPS.name, *matchers)
    colors = {str(phase): color for phase, color in COLORS.items()}
    return Series(sum_by(("phase",), by_phase), "{{phase}}", colors=colors)
