"""What the comparison of vLLM under Stageline with vLLM by itself makes of its starts."""

from typing import Any

from stageline_bench.runtime.peers.peer_bench import STAGELINE, VLLM
from stageline_bench.runtime.peers.served_engines import STAGELINE_VLLM
from stageline_bench.runtime.peers.vllm_engine import vllm_engine_targets
from stageline_bench.runtime.record.report import render
from stageline_bench.runtime.record.results import Machine, Result


def start(number: int, engine: str, few: float, many: float, *, ttft: float = 0.3, tpot: float = 0.1) -> dict[str, Any]:
    times = {"mean_ttft_seconds": ttft, "p99_ttft_seconds": ttft, "mean_tpot_seconds": tpot, "p99_tpot_seconds": tpot}
    return {"start": number, "engine": engine, "rates": {"16": [few, few], "64": [many, many]}, **times}


STARTS = [
    start(0, STAGELINE_VLLM, 110.0, 240.0, ttft=0.2),
    start(0, VLLM, 100.0, 200.0, ttft=0.4),
    start(0, STAGELINE, 130.0, 300.0),
    start(1, VLLM, 50.0, 100.0, tpot=0.05),
    start(1, STAGELINE_VLLM, 52.0, 112.0, ttft=0.15),
    start(2, STAGELINE_VLLM, 112.0, 230.0, ttft=0.3),
    start(2, VLLM, 100.0, 200.0, ttft=0.4),
]


def test_ratios_are_medians_of_paired_starts_and_held_against_the_floors() -> None:
    targets = {target.name: target for target in vllm_engine_targets(STARTS)}
    few = targets["burst of 16: vLLM under Stageline / vLLM"]
    many = targets["burst of 64: vLLM under Stageline / vLLM"]
    assert (few.measured, few.at_least, few.met) == (1.1, 1.08, True)
    assert (many.measured, many.at_least, many.met) == (1.15, 1.15, True)
    assert targets["TTFT of arrivals: vLLM under Stageline / vLLM"].measured == 0.5
    assert targets["TPOT of arrivals: vLLM under Stageline / vLLM"].measured == 1.0


def test_a_start_without_its_pair_gives_no_ratio_rather_than_a_wrong_one() -> None:
    assert [target.measured for target in vllm_engine_targets(STARTS[:-1])] == [None] * 4
    assert [target.met for target in vllm_engine_targets([])] == [None] * 4


def test_the_table_has_a_row_for_each_server_and_names_the_floors() -> None:
    machine = Machine(cpu="a CPU", cores=2, torch="2.13.0", python="3.11.7", load_average=0.1)
    page = render(
        Result(
            program="vllm-engine",
            date="2026-11-22",
            machine=machine,
            parameters={"stages": 2},
            rounds=STARTS,
            targets=vllm_engine_targets(STARTS),
        )
    )
    assert "| stageline-vllm | 110 (52 to 112) | 230 (112 to 240) | 200.0 | 100.0 |" in page
    assert "| vllm | 100 (50 to 100) | 200 (100 to 200) | 400.0 | 100.0 |" in page
    assert "| burst of 16: vLLM under Stageline / vLLM | ≥ 1.08 | 1.1 | yes |" in page
