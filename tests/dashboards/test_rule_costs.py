"""`make bench-rules`: what it holds the groups of rules to, and the past that it gives them."""

from typing import Any

import pytest

from boards.long_windows import Remembered, blocks, intervals, remembered
from boards.rule_evaluations import Evaluations, medians, report, share_of_a_core, too_slow


def said(seconds: float, moment: str) -> list[dict[str, Any]]:
    """Prometheus' word on all groups, each of one rule that took as long."""
    evaluated = {"lastEvaluation": moment, "evaluationTime": seconds}
    return [{"name": name, "rules": [{"name": "r", "alerts": [], **evaluated}], **evaluated} for name in intervals()]


def test_each_group_has_a_second_of_its_own_and_the_sum_of_all_none() -> None:
    quick = dict.fromkeys(intervals(), 0.9)
    assert sum(quick.values()) > 10
    assert too_slow(quick) == []
    assert too_slow(quick | {"stageline-models": 1.0, "stageline-users": 1.2}) == [
        "stageline-models",
        "stageline-users",
    ]


def test_a_group_that_was_never_evaluated_has_not_been_quick() -> None:
    found = Evaluations()
    found.add(said(0.1, "0001-01-01T00:00:00Z"))
    assert too_slow(medians(found.groups)) == sorted(intervals())


def test_an_evaluation_that_is_told_twice_counts_once() -> None:
    found = Evaluations()
    for seconds, moment in (
        (0.1, "2026-01-01T00:00:00Z"),
        (0.1, "2026-01-01T00:00:00Z"),
        (0.3, "2026-01-01T00:00:30Z"),
    ):
        found.add(said(seconds, moment))
    assert set(medians(found.groups).values()) == {0.2}
    assert any("0.2" in line or "200.0" in line for line in report(found, series=7))


def test_the_share_of_a_core_goes_by_how_often_each_group_is_evaluated() -> None:
    often, seldom = "stageline-models", "stageline-models-over-days"
    assert (intervals()[often], intervals()[seldom]) == (30, 120)
    assert share_of_a_core({often: 0.3, seldom: 0.6}) == pytest.approx(0.3 / 30 + 0.6 / 120)


def test_the_past_is_as_long_and_as_dense_as_the_rules_read_and_record_it() -> None:
    past = {each.name: each for each in remembered(longer_than=300)}
    assert past["model:stageline_gateway_failed:increase20m"].window == 3 * 86400
    assert past["model:stageline_gateway_failed:increase20m"].interval == 120
    assert past["model:stageline_gateway_failed:rate5m"].window == 6 * 3600
    assert past["model:stageline_gateway_failed:rate5m"].interval == 30


def test_no_rule_steps_over_a_day_of_what_is_recorded_every_half_minute() -> None:
    """A window costs every sample in it, and 500 models have many."""
    assert [each.name for each in remembered(longer_than=6 * 3600) if each.interval < 120] == []


def test_blocks_hold_each_evaluation_once_and_nothing_before_the_window() -> None:
    until = 1_700_000_000
    name = "model:stageline_gateway_failed:rate5m"
    texts = list(blocks([Remembered(name, window=3 * 3600, interval=30)], 2, until, burning=True))
    assert all(text.endswith("# EOF\n") for text in texts)
    samples = [line.split() for text in texts for line in text.splitlines() if 'model_name="model-001"' in line]
    moments = [int(moment) for *_, moment in samples]
    assert moments == list(range(until - 3 * 3600 + 10, until, 30)), "multiples of 30"
    assert {text for text in texts if "model-002" in text} == set()


def test_unless_all_burns_nothing_was_missed() -> None:
    failed = Remembered("model:stageline_gateway_failed:rate5m", window=60, interval=30)
    asked = Remembered("model:stageline_gateway_answered:rate5m", window=60, interval=30)

    def values(burning: bool) -> set[bool]:
        lines = [line for each in (failed, asked) for line in each.lines(1, 0, 60, 60, burning=burning)]
        missed = [line for text in lines for line in text.splitlines() if line.startswith(failed.name)]
        return {float(line.split()[1]) > 0 for line in missed}

    assert (values(burning=False), values(burning=True)) == ({False}, {True})
