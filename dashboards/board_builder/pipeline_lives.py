"""Panels of *Pipeline* about groups' lives: which incarnation, what its stages are doing, why the last one ended."""

from typing import Final

from board_builder.layout import Section, line, section
from board_builder.panels import COUNT, Series, Text, lines, states
from board_builder.queries import current, events, in_order, min_by, selected
from board_builder.stages import GROUP
from stageline_api.health import Phase
from stageline_operator.controller.telemetry import metric_names as operator
from stageline_runtime import metric_names as names

COLORS: Final = {
    Phase.STARTING: "light-blue",
    Phase.CONNECTING: "blue",
    Phase.LOADING: "dark-blue",
    Phase.RENDEZVOUS: "purple",
    Phase.WARMING: "yellow",
    Phase.READY: "green",
    Phase.DRAINING: "gray",
    Phase.FAILED: "red",
}
_ORDER: Final = tuple(COLORS)


def lives(of_model: tuple[str, ...], of_group: tuple[str, ...]) -> Section:
    """Incarnations, what their stages are doing, and why they ended."""
    incarnation = Text(
        "Incarnation",
        "Which life of its group each stage belongs to. A step is a group formed anew; a staircase one that fails "
        "again and again.",
        COUNT,
    )
    phases = Text(
        "Stage phase",
        "Where stages are in their lives, in this order: Starting, Connecting, Loading, Rendezvous, Warming, Ready, "
        "Draining. The one that stays behind holds up its group.",
        "none",
    )
    failures = Text(
        "Group failures by class", "Failures of the model's groups by class of the cause, in the window.", COUNT
    )
    failed = events(("failure_class",), operator.GROUP_FAILURES_TOTAL.name, *of_model)
    names_of_phases = {number: (str(phase), COLORS[phase]) for number, phase in enumerate(_ORDER)}
    return section(
        "Incarnations and failures",
        line(
            8,
            lines(incarnation, Series(current(GROUP, names.STAGE_INCARNATION.name, *of_group), "group {{group}}")),
            states(phases, Series(_phase_number(of_group), "group {{group}} stage {{stage}}"), names_of_phases),
            lines(failures, Series(failed, "{{failure_class}}")),
        ),
    )


def _phase_number(matchers: tuple[str, ...]) -> str:
    """Each stage's phase as its place in the usual order; nothing for a stage that isn't there.

    While one pod of it ends and the next one starts, that of the next, which is further back.
    """
    in_phase = (selected(names.STAGE_PHASE.name, f'phase="{phase}"', *matchers) for phase in _ORDER)
    numbered = (f"{number} * ({series} == 1)" for number, series in enumerate(in_phase))
    return in_order(min_by(("cluster", "group", "stage"), " or ".join(numbered)))
