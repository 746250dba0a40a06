"""Figures of a benchmark from known inputs."""

from typing import cast

import pytest

from stageline_api.errors import UserError
from stageline_bench.runtime.group import bench_group
from stageline_bench.runtime.group.bench_group import BenchGroup
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.peers.peer_bench import peer_targets
from stageline_bench.runtime.record.figures import (
    RoundReport,
    common_window_tokens_per_second,
    median_ratio,
    ran_together,
)
from stageline_bench.runtime.record.report import render
from stageline_bench.runtime.record.results import Result, Target, round_figures, this_machine
from stageline_bench.runtime.record.stage_clock import StageSeconds, pipeline_figures


def report(submitted: float, *token_seconds: tuple[float, ...]) -> RoundReport:
    return RoundReport(
        submitted_seconds=submitted, token_seconds=token_seconds, engine_cpu_seconds=0.0, stages=(), steady_stages=None
    )


def stage(busy: dict[str, float], wait: dict[str, float], *, idle: float = 0.0, steps: float = 10.0) -> StageSeconds:
    wall = sum(busy.values()) + sum(wait.values()) + idle
    return StageSeconds(busy=busy, wait=wait, idle=idle, wall=wall, steps=steps)


def test_rate_runs_from_the_submission_to_the_last_token() -> None:
    one = report(10.0, (11.0, 12.0, 13.0), (12.0, 13.0, 14.0))
    assert one.tokens_per_second == pytest.approx(6 / 4)
    assert one.mean_ttft_seconds == pytest.approx(1.5)
    assert one.mean_tpot_seconds == pytest.approx(1.0)


def test_engines_at_once_are_counted_only_while_all_of_them_run() -> None:
    early = report(0.0, (1.0, 2.0, 3.0, 4.0))
    late = report(1.5, (2.5, 3.5, 4.5, 5.5))
    # From 1.5 (both submitted) to 4.0 (the first is done): 2, 3, 4 of the one, 2.5 and 3.5 of the other.
    assert common_window_tokens_per_second([early, late]) == pytest.approx(5 / 2.5)


APART = [report(0.0, (1.0,)), report(2.0, (3.0,))]
TOGETHER = [report(0.0, (1.0,)), report(0.5, (3.0,))]


def test_engines_that_did_not_overlap_have_no_common_rate() -> None:
    assert not ran_together(APART)
    assert ran_together(TOGETHER)
    with pytest.raises(ValueError, match="same time"):
        common_window_tokens_per_second(APART)


class ScriptedGroup:
    """Ends its rounds as it is told."""

    def __init__(self, *reports: RoundReport) -> None:
        self.reports = list(reports)

    def begin(self, workload: Workload, start_at_seconds: float) -> None:
        assert self.reports, (workload, start_at_seconds)

    def finish(self) -> RoundReport:
        return self.reports.pop(0)


def run_scripted(rounds: list[list[RoundReport]]) -> list[RoundReport]:
    groups = [cast(BenchGroup, ScriptedGroup(*reports)) for reports in zip(*rounds, strict=True)]
    return bench_group.run_together(groups, Workload(name="w", requests=1), delay_seconds=0.0)


def test_a_round_whose_engines_missed_each_other_is_run_again_some_times() -> None:
    assert run_scripted([APART, APART, TOGETHER]) == TOGETHER
    with pytest.raises(UserError, match="too busy to measure"):
        run_scripted([APART] * bench_group.TRIES)


def test_a_window_without_a_step_on_some_stage_has_no_figures() -> None:
    windows = (stage({"decode": 1.0}, {"host": 1.0}), stage({"decode": 1.0}, {"host": 1.0}, steps=0.0))
    whole = windows[:1]
    for steady, found in ((windows, False), (whole, True), (None, False)):
        one = report(0.0, (1.0, 2.0)).model_copy(update={"stages": whole, "steady_stages": steady})
        assert bool(round_figures(one)["steady"]) == found


def test_a_program_of_rounds_without_a_steady_part_says_so_in_its_table() -> None:
    whole = (stage({"decode": 1.0}, {"host": 1.0}),)
    one = round_figures(report(0.0, (1.0, 2.0)).model_copy(update={"stages": whole, "steady_stages": None}))
    result = Result(program="paced", date="2026-11-22", machine=this_machine(), parameters={}, rounds=[one], targets=[])
    assert "| steady decode | - | - | - | - |\n| whole burst | 0." in render(result)


def test_ratios_are_taken_pair_by_pair() -> None:
    # The ratio of the medians would be 3 / 2; the pairs say 1, 3 and 1.5.
    assert median_ratio([1.0, 9.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="argument"):
        median_ratio([1.0], [1.0, 2.0])


def test_pipeline_figures_follow_their_definitions() -> None:
    stages = [
        stage({"decode": 6.0, "dummy": 1.0}, {"feedback": 2.0, "host": 1.0}, idle=5.0, steps=100.0),
        stage({"decode": 5.0}, {"recv": 4.5, "host": 0.5}, idle=5.0, steps=100.0),
    ]
    figures = pipeline_figures(stages)
    assert figures.bubble_ratio == pytest.approx((2 + 1 + 4.5 + 0.5 + 1) / (7 + 5 + 3 + 5))
    assert figures.bottleneck_share == pytest.approx(7 / 10)
    assert figures.imbalance == pytest.approx(7 / 6)
    assert figures.host_seconds_per_step == pytest.approx(0.01)
    assert figures.clock_error == pytest.approx(0.0)


def test_a_clock_that_loses_time_is_told() -> None:
    leaking = StageSeconds(busy={"decode": 8.0}, wait={}, idle=1.0, wall=10.0, steps=1.0)
    assert pipeline_figures([leaking]).clock_error == pytest.approx(0.1)


def test_a_window_is_what_was_added() -> None:
    before = stage({"decode": 1.0}, {"host": 1.0}, steps=3.0)
    after = stage({"decode": 4.0}, {"host": 1.5}, idle=2.0, steps=9.0)
    window = after.since(before)
    assert (window.busy_seconds, window.wait_seconds, window.idle, window.steps) == (3.0, 0.5, 2.0, 6.0)


def test_prompts_follow_from_the_seed_and_stay_within_the_vocabulary() -> None:
    workload = Workload(name="w", requests=3, input_tokens=5)
    prompts = workload.prompts(200)
    assert prompts == workload.prompts(200)
    assert prompts != workload.with_seed(1).prompts(200)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert all(100 <= token < 200 for prompt in prompts for token in prompt)


def test_a_target_without_a_measurement_is_neither_met_nor_missed() -> None:
    assert Target(name="t", measured=None, at_least=1.0).met is None
    assert Target(name="t", measured=1.0, at_least=1.0).met is True
    assert Target(name="t", measured=0.06, at_most=0.05).met is False


def test_peers_are_compared_start_by_start() -> None:
    def start(engine: str, number: int, rates: list[float]) -> dict[str, object]:
        return {"start": number, "engine": engine, "stages": 2, "rates": {"decode-16": rates}}

    measured = [
        start("stageline", 0, [100.0, 300.0, 200.0]),
        start("vllm", 0, [100.0]),
        start("vllm", 1, [200.0]),
        start("stageline", 1, [100.0]),
    ]
    targets = {target.name: target for target in peer_targets(measured)}
    decode = targets["P = 2, decode-16: Stageline / vLLM"]
    assert decode.measured == pytest.approx((2.0 + 0.5) / 2)
    assert decode.met is True
    assert targets["P = 1, decode-8: Stageline / vLLM"].measured is None
