"""Annotations on the time axis: changes that may explain others."""

from grafana_foundation_sdk.builders.dashboard import AnnotationQuery

from board_builder.panels import DATASOURCE
from board_builder.queries import WINDOW, current, max_by, selected, sum_by
from board_builder.stages import GROUP
from board_builder.variables import CLUSTER
from stageline_operator.controller.telemetry import metric_names as operator
from stageline_runtime import metric_names as runtime

FIRING = selected("ALERTS", 'alertname=~"Stageline.*"', 'alertstate="firing"', CLUSTER)
"""Stageline's firing alerts: a series that Prometheus itself records."""


def mark(name: str, color: str, expr: str, title: str, text: str) -> AnnotationQuery:
    """An annotation while `expr` has a sample; `title` and `text` may contain its labels."""
    annotation = AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).hide(False).icon_color(color)
    return annotation.expr(expr).title_format(title).text_format(text).step("30s").use_value_for_time(False)


def reformed_groups(*matchers: str) -> AnnotationQuery:
    """A failed group is back at its next incarnation; its previous one ended at most an hour ago.

    Its pods are new ones, so no single series changes, and there is none while the group is down.
    """
    incarnation = runtime.STAGE_INCARNATION.name
    before = f"max_over_time({selected(incarnation, *matchers)}[1h] offset {WINDOW})"
    expr = f"{current(GROUP, incarnation, *matchers)} > {max_by(GROUP, before)}"
    return mark("Groups formed anew", "red", expr, "Group formed anew", "{{namespace}}/{{model}} group {{group}}")


def rollouts(*matchers: str) -> AnnotationQuery:
    """Groups of a model are being replaced by groups of another revision."""
    expr = current(("cluster", "namespace", "model"), operator.GROUPS.name, 'phase="Replacing"', *matchers) + " > 0"
    return mark("Rollouts", "blue", expr, "Rollout", "{{namespace}}/{{model}}")


def firing_alerts() -> AnnotationQuery:
    """Stageline's alerts while they fire."""
    expr = sum_by(("alertname", "severity"), FIRING) + " > 0"
    return mark("Firing alerts", "orange", expr, "{{alertname}}", "severity {{severity}}")
