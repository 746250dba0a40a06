"""The shipped rules, held to what Prometheus' own checker finds and to what they must say of scripted series."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from boards.exported_names import missing_names
from boards.long_windows import grouped_rules, intervals
from boards.promtool import needs_promtool, promtool
from boards.rule_names import exported_in, recorded_in, recorded_names, shipped_rules
from processes.repository_files import ROOT
from stageline_dashboards.shipped import rule_paths
from stageline_local.monitoring.scrape import seconds_of

CASES: Final = sorted(Path(__file__).with_name("rules").glob("*.yaml"))


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", *rule_paths())


@needs_promtool
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_rules_say_what_scripted_series_call_for(cases: Path) -> None:
    promtool("test", "rules", cases)


def test_rules_name_only_what_the_real_endpoints_export(exported_pages: Mapping[str, str]) -> None:
    used = {name for rule in shipped_rules() for name in exported_in(rule["expr"])}
    assert len(used) > 20
    assert missing_names(used, exported_pages) == []


def test_no_rule_reads_buckets_over_more_than_five_minutes() -> None:
    """Of 500 models and weeks that would be what a Prometheus dies of: long windows add up what was recorded."""
    bucket = re.compile(r"\w+_bucket(?::objective)?(?:\{[^}]*\})?\[([^\]]+)\]")
    windows = {window for rule in shipped_rules() for window in bucket.findall(rule["expr"])}
    assert windows == {"5m"}


def test_spans_that_a_long_window_adds_up_are_next_to_one_another() -> None:
    """A step as long as a span, and a span of whole intervals: else spans would overlap and leave gaps by turns."""
    recorded = {rule["record"]: (group, rule["expr"]) for group, rule in grouped_rules() if "record" in rule}
    added = re.compile(r"(model:\w+:increase(\w+))\[\w+:(\w+)\]")
    found = {each for _, rule in grouped_rules() for each in added.findall(rule["expr"])}
    assert len(found) == 7
    for name, span, step in found:
        group, expr = recorded[name]
        assert step == span
        assert f"[{span}:" in expr
        assert seconds_of(span) % intervals()[group] == 0


def test_recorded_names_are_made_by_a_rule_and_say_level_metric_and_operations() -> None:
    used = {name for rule in shipped_rules() for name in recorded_in(rule["expr"])}
    assert used <= recorded_names()
    for name in recorded_names():
        level, metric, operations = name.split(":")
        assert level in {
            "stageline",
            "pod",
            "namespace",
            "model",
            "model_ready",
            "group",
            "group_failure",
            "stage",
            "stage_kind",
            "stage_reason",
        }, name
        assert all((metric, operations)), name
        assert not metric.endswith("_total"), name


def test_the_page_of_recorded_series_says_what_each_name_is() -> None:
    page = (ROOT / "docs" / "dev" / "recorded-metrics.md").read_text(encoding="utf-8")
    of_shortest = {re.sub(r"ratio_rate\w+$", "ratio_rate5m", name) for name in recorded_names()}
    of_shortest = {re.sub(r"increase\w+$", "increase20m", name) for name in of_shortest}
    assert recorded_in(page) == of_shortest
