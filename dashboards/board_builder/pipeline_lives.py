"""Panels of *Pipeline*: incarnations of groups, phases of their stages, and causes of failures."""

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
    """Incarnations, phases of their stages, and causes of their ends."""
    incarnation = Text(
        "Incarnation",
        "Incarnation of each stage's group. A step is a restarted group; a staircase one that fails again and again.",
        COUNT,
    )
    phases = Text(
        "Stage phase",
        "Phases of stages, in this order: Starting, Connecting, Loading, Rendezvous, Warming, Ready, "
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
    """Each stage's phase as its index in the usual order; no sample for a missing stage.

    While one pod of a stage ends and the next one starts, it is the phase of the next one, which is the earlier phase.
    """
    in_phase = (selected(names.STAGE_PHASE.name, f'phase="{phase}"', *matchers) for phase in _ORDER)
    numbered = (f"{number} * ({series} == 1)" for number, series in enumerate(in_phase))
    return in_order(min_by(("cluster", "group", "stage"), " or ".join(numbered)))
