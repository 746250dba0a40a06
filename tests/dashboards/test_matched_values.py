"""What rules and boards match labels with are values that the code gives those labels."""

import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final

import pytest
from prometheus_client.utils import floatToGoString

from boards.board_queries import BOARDS, every_expression
from boards.metrics_page import METRICS
from boards.rule_names import shipped_rules
from stageline_api.conditions import ConditionType, Reason
from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_operator.controller.telemetry.metric_names import RECONCILE_TOTAL
from stageline_operator.planner.group.stage_rows import NotReady
from stageline_operator.planner.types import GroupPhase
from stageline_runtime.stage.telemetry.state_clock import BusyKind, WaitReason

ALL_METRICS: Final = [spec for specs in METRICS.values() for spec in specs]
STATUS: Final = frozenset({"True", "False", "Unknown"})
"""Of a condition."""
VALUES: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    ("stage", "kind"): frozenset(BusyKind),
    ("stage", "reason"): frozenset(WaitReason),
    ("stage_phase", "phase"): frozenset(Phase),
    ("operator_group_phase", "phase"): frozenset(GroupPhase),
    ("operator_groups", "phase"): frozenset(GroupPhase),
    ("operator_reconcile_total", "outcome"): frozenset(re.findall(r"\w+", RECONCILE_TOTAL.help)),
    ("operator_stage_not_ready", "reason"): frozenset(NotReady) | frozenset(FailureClass),
    ("operator_model_condition", "type"): frozenset(ConditionType),
    ("operator_model_condition", "status"): STATUS,
    ("operator_model_condition", "reason"): frozenset(Reason),
    ("operator_models", "ready"): STATUS,
    ("gateway_groups", "ready"): frozenset({"true", "false"}),
    ("", "le"): frozenset(floatToGoString(bound) for spec in ALL_METRICS for bound in (*spec.buckets, math.inf)),  # type: ignore[no-untyped-call]
}
"""By the beginning of a metric's name, `stageline_` left out, and label; the longest beginning counts."""
ANY: Final = frozenset(
    {
        "cluster",
        "namespace",
        "model",
        "model_name",
        "group",
        "stage",
        "pod",
        "job",
        "endpoint",
        "code",
        "alertname",
        "alertstate",
    }
)
"""Labels whose values are names, numbers or somebody else's words."""
_SELECTOR: Final = re.compile(r"(?:[a-z_]+:)?(?<!\w)(stageline_\w+|ALERTS|up)(?::\w+)?\{([^}]*)\}")
_MATCHER: Final = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')


def matchers(expr: str) -> Iterator[tuple[str, str, str]]:
    """(metric, label, value) of each matcher, alternatives apart."""
    for metric, inside in _SELECTOR.findall(expr):
        for label, value in _MATCHER.findall(inside):
            yield from ((metric, label, one) for one in value.split("|"))


def values_of(metric: str, label: str) -> frozenset[str]:
    """What a label may say. Raises KeyError for one that no table here knows."""
    known = [key for key in VALUES if key[1] == label and metric.removeprefix("stageline_").startswith(key[0])]
    return VALUES[max(known, key=lambda key: len(key[0]), default=(metric, label))]


def unknown(expr: str) -> list[tuple[str, str, str]]:
    """Matchers with values that nothing gives their labels."""
    return [each for each in matchers(expr) if each[1] not in ANY and each[2] and each[2] not in values_of(*each[:2])]


def test_rules_and_boards_match_only_values_that_the_code_gives() -> None:
    rules = [rule["expr"] for rule in shipped_rules()]
    boards = chain.from_iterable(every_expression(path) for path in BOARDS.values())
    exprs = [*rules, *boards]
    checked = {each[:2] for expr in exprs for each in matchers(expr) if each[1] not in ANY}
    assert {label for _, label in checked} >= {"kind", "phase", "reason", "ready", "status", "type"}, checked
    assert [wrong for expr in exprs for wrong in unknown(expr)] == []


@pytest.mark.parametrize(
    "expr",
    [
        'rate(stageline_stage_busy_seconds_total{kind="dumy"}[5m])',
        'stageline_operator_group_phase{phase!~"Ready|Drained"}',
        'model_ready:stageline_gateway_groups:max{ready="True"}',
        'stageline_operator_stage_not_ready{reason!="Begins"}',
    ],
)
def test_a_value_that_nothing_gives_is_noticed(expr: str) -> None:
    assert unknown(expr)
