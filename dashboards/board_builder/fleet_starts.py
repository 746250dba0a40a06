"""Panels of *Fleet*: time to ready, cold and warm, by phase, and recovery time by cause."""

from board_builder.layout import Section, line, section
from board_builder.panels import AnyPanel, Series, Text, lines
from board_builder.queries import max_by, mean, selected
from board_builder.variables import CLUSTER
from stageline_operator.controller.telemetry import metric_names as operator
from stageline_runtime import metric_names as names


def starts(of_model: tuple[str, ...]) -> Section:
    """For all models, because the operator has no model label on these; the stages' own times are of the selected
    models.
    """
    panels = _whole(), _phases(), _of_stages(of_model), _recovery()
    return section("Startup and recovery", line(8, *panels), collapsed=True)


def _whole() -> AnyPanel:
    text = Text(
        "Time to ready",
        "Mean from an incarnation's first pod to the group being ready. Cold: a pod had to fetch the model; warm: all "
        "found it in their caches.",
        "s",
    )
    return lines(text, Series(mean(("cache",), operator.TIME_TO_READY.name, CLUSTER), "{{cache}}"))


def _phases() -> AnyPanel:
    text = Text(
        "Time to ready by phase",
        "Mean of each phase: finding nodes (schedule), images and volumes (pull), the model's files (prepare), then "
        "weights, rendezvous and warm-up (start), which the next panel divides.",
        "s",
    )
    series = Series(mean(("phase", "cache"), operator.STARTUP_PHASE.name, CLUSTER), "{{phase}} ({{cache}})")
    return lines(text, series)


def _of_stages(of_model: tuple[str, ...]) -> AnyPanel:
    text = Text(
        "Slowest stage's startup",
        "What the slowest stage that runs now spent in each phase until it was ready: Loading is weights, Warming is "
        "the first steps and what gets compiled for them.",
        "s",
    )
    return lines(text, Series(max_by(("phase",), selected(names.STAGE_STARTUP.name, *of_model)), "{{phase}}"))


def _recovery() -> AnyPanel:
    text = Text(
        "Recovery time by cause",
        "Mean from a group's failure to its next incarnation being ready, the wait before it included, by class of "
        "the failure.",
        "s",
    )
    return lines(text, Series(mean(("failure_class",), operator.RECOVERY.name, CLUSTER), "{{failure_class}}"))
