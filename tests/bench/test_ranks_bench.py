"""What the benchmark of ranks compares, what it holds against which floor, and how it says that one is missed."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from stageline_bench.runtime.command import bench
from stageline_bench.runtime.group.bench_group import STAGE_COMMAND
from stageline_bench.runtime.peers.vllm_tensor import first_cause
from stageline_bench.runtime.ranks import EXPERT, PINNED, TENSOR, UNPINNED, missed, rank_cases, rank_shape
from stageline_bench.runtime.record.report import render
from stageline_bench.runtime.record.results import Machine, Result, Target

CORES = sorted(os.sched_getaffinity(0))


def test_pinned_ranks_have_a_core_each_and_one_rank_has_one() -> None:
    one, two = (rank_shape(TENSOR, ranks, PINNED, (4, 5)) for ranks in (1, 2))
    assert (one.cores_of(0), one.engine_cores, one.tensor) == ((4,), (4,), 1)
    assert one.command_of_stage() == STAGE_COMMAND
    assert (two.cores_of(0), two.engine_cores, two.tensor, two.expert) == ((4, 5), (4, 5), 2, 1)
    assert two.command_of_stage()[-1] == "4,5"


def test_what_is_not_pinned_floats_as_it_does_in_a_pod() -> None:
    floating = rank_shape(EXPERT, 2, UNPINNED, (4, 5))
    assert (floating.cores_of(0), floating.engine_cores) == ((), ())
    assert (floating.command_of_stage(), floating.expert, floating.tensor) == (STAGE_COMMAND, 2, 1)


def test_only_pinned_cases_are_held_against_a_floor() -> None:
    cases = {case.name: case for case in rank_cases(TENSOR, 512, {1: 1.3, 8: None})}
    assert {name: case.floors for name, case in cases.items()} == {
        "tensor, 1 request, pinned": {"tensor 2, pinned": 1.3},
        "tensor, 1 request, unpinned": {},
        "tensor, 8 requests, pinned": {},
        "tensor, 8 requests, unpinned": {},
    }
    assert cases["tensor, 8 requests, pinned"].variants == ("tensor 1, pinned", "tensor 2, pinned")
    assert len(cases["tensor, 8 requests, pinned"].order.prompts) == 8


def test_missed_floors_are_one_sentence_and_what_was_not_measured_is_none_of_them() -> None:
    met = Target(name="a", measured=1.4, at_least=1.3)
    unknown = Target(name="b", measured=None, at_least=1.0)
    assert missed([met, unknown]) is None
    slow = Target(name="c", measured=1.25, at_least=1.3)
    dear = Target(name="d", measured=41.5, at_most=30)
    assert missed([met, slow, unknown, dear]) == (
        "floors are missed: c is 1.25, at least 1.3 is wanted; d is 41.5, at most 30 is wanted"
    )


def test_the_page_divides_two_ranks_by_one_round_by_round() -> None:
    result = Result(
        program="ranks",
        date="2026-11-25",
        machine=Machine(cpu="c", cores=2, torch="t", python="p", load_average=0.0),
        parameters={"rounds": 2},
        rounds=[
            {"case": "all-reduce of [8, 576] bfloat16", "microseconds": 9.0},
            {"case": "x", "tokens_per_second": {"one": 10.0, "two": 30.0}},
            {"case": "x", "tokens_per_second": {"two": 20.0, "one": 20.0}},
        ],
        targets=[Target(name="x: two / one", measured=2.0, at_least=1.3)],
    )
    page = render(result)
    assert "| x | one: 15.0 (10.0 to 20.0); two: 25.0 (20.0 to 30.0) | 2.00 |" in page
    assert "| all-reduce of [8, 576] bfloat16 | 9.0 (9.0 to 9.0) µs | - |" in page
    assert "| x: two / one | ≥ 1.3 | 2 | yes |" in page


def test_the_first_exception_is_the_cause_and_without_one_the_last_line() -> None:
    lines = ["starting", "ValueError: no such cores", "RuntimeError: Engine core initialization failed"]
    assert first_cause(lines) == "ValueError: no such cores"
    assert first_cause(["starting", "Killed"]) == "Killed"
    assert first_cause([]) == "no word"


def test_one_core_is_refused_before_anything_starts() -> None:
    refused = CliRunner().invoke(bench, ["ranks", "--cores", str(CORES[0])])
    assert refused.exit_code == 2
    assert "give two cores" in refused.output


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(CORES) < 2, reason="a core for each of two ranks")
def test_a_trial_runs_every_kind_of_group_and_keeps_nothing(tmp_path: Path) -> None:
    options = ["--trial", "--without-vllm", "--rounds", "1", "--cores", f"{CORES[0]},{CORES[1]}"]
    places = ["--cache-dir", str(tmp_path / "models"), "--results", str(tmp_path / "results")]
    done = CliRunner().invoke(bench, ["ranks", *options, *places])
    assert done.exit_code == 0, done.output
    for said in ("all-reduce of [8, 576]", "tensor, 1 request, pinned", "tensor, 8 requests, unpinned", "expert, 16"):
        assert said in done.output, done.output
    assert not (tmp_path / "results").exists()
