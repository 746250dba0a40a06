"""Rules select, group and join by labels that the series have, and their texts name labels that the alerts have."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from boards.alert_scenarios import alerting_rules
from boards.promql_labels import alert_labels, labels_of, read
from boards.rule_names import shipped_groups, shipped_rules

RULES = shipped_rules()
GROUP = {"cluster", "namespace", "model", "model_name", "group"}


def title(rule: Mapping[str, Any]) -> str:
    """For a test's name."""
    return str(rule.get("record") or f"{rule['alert']} {rule['labels'].get('long_window', '')}")


@pytest.mark.parametrize("rule", RULES, ids=title)
def test_every_label_that_a_rule_relies_on_is_there(rule: Mapping[str, Any]) -> None:
    assert read(rule["expr"]).wrong == []


@pytest.mark.parametrize("rule", alerting_rules(), ids=title)
def test_texts_name_labels_that_the_alert_has(rule: Mapping[str, Any]) -> None:
    named = {label for text in rule["annotations"].values() for label in re.findall(r"\$labels\.(\w+)", text)}
    assert named <= alert_labels(rule)


@pytest.mark.parametrize("rule", RULES, ids=title)
def test_a_rule_keeps_clusters_apart(rule: Mapping[str, Any]) -> None:
    """One Prometheus may evaluate them for many; only the objectives of all models are the same in each."""
    if not str(rule.get("record")).startswith("stageline:"):
        assert "cluster" in read(rule["expr"]).labels
    joined = {labels for labels in re.findall(r"\bon \(([^)]*)\)", rule["expr"]) if "cluster" not in labels}
    assert joined <= {""}, "an objective is joined by nothing, all else by its cluster too"


def test_every_group_of_rules_says_how_often_it_is_evaluated() -> None:
    groups = shipped_groups()
    assert {group["name"]: group.get("interval") for group in groups if "interval" not in group} == {}
    long = [group for group in groups if group["interval"] != "30s"]
    assert {group["interval"] for group in long} == {"2m"}, "one missed evaluation, and a sample is still found: 5 min"
    windows = {re.split("rate|increase", rule["record"])[-1] for group in long for rule in group["rules"]}
    assert windows == {"20m", "2h", "6h", "1d", "3d"}


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("stage:stageline_stage_busy_per_other_stage:ratio_rate5m", {*GROUP, "stage"}),
        ("group:stageline_stage_busy_max_per_mean:ratio_rate5m", GROUP),
        ("group:stageline_group_incarnation:max", {"cluster", "namespace", "model", "group"}),
        ("model:stageline_operator_model_desired_replicas:max", {"cluster", "namespace", "model_name"}),
        ("model:stageline_first_token_seconds:objective", {"cluster", "namespace", "model_name"}),
        ("model:stageline_first_token_bucket:objective", {"cluster", "namespace", "model_name", "le"}),
        ("stageline:slow_request_ratio:objective", set()),
    ],
)
def test_recorded_series_have_the_labels_that_their_rules_leave(name: str, labels: set[str]) -> None:
    assert labels_of(name) == labels


@pytest.mark.parametrize(
    "expr",
    [
        'stageline_gateway_groups{raedy="true"} > 0',
        "max by (namespace, model) (stageline_gateway_groups)",
        "stageline_operator_group_phase == 1 and on (model_name) stageline_operator_model_info",
        'max by (namespace) (model_ready:stageline_gateway_groups:max{pod="a"})',
        "sum by (namespace) (stageline_gateway_groups) > on (namespace) sum(stageline_operator_leader)",
        'count_values by (model_name) ("ready", stageline_operator_leader)',
    ],
)
def test_a_label_that_is_not_there_is_noticed(expr: str) -> None:
    assert read(expr).wrong


@pytest.mark.parametrize(
    "expr",
    [
        "sum(stageline_gateway_groups) by (namespace)",
        "sum without (pod) (stageline_gateway_groups)",
        "stageline_operator_leader / ignoring(pod) stageline_operator_leader",
    ],
)
def test_what_the_reading_does_not_understand_is_no_pass(expr: str) -> None:
    with pytest.raises(ValueError, match="is not understood here"):
        read(expr)
