"""`make bench-peers`: vLLM and Stageline on the same prompts and cores, engine starts interleaved.

A start runs one engine with every workload `rounds` times after a warm-up. vLLM's and Stageline's starts alternate, so
that other load on the machine affects both. Ratios are medians of pairs: the n-th start of one over the n-th of the
other, each by the median of its rounds.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from stageline_bench.runtime.group.bench_group import GroupShape, bench_group
from stageline_bench.runtime.group.line_process import LineProcess
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.peers.peer_environment import PEER, vllm_variables
from stageline_bench.runtime.record.figures import median_ratio
from stageline_bench.runtime.record.results import Result, Target, this_machine, today
from stageline_runtime.model_facts.model_config import read_model_config

STAGELINE, VLLM = "stageline", "vllm"
WORKLOADS = (
    Workload(name="decode-8", requests=8),
    Workload(name="decode-16", requests=16),
    Workload(name="decode-64", requests=64),
    Workload(name="prefill-16", requests=16, input_tokens=512, output_tokens=8),
)
TARGETS: dict[tuple[int, str], float] = {
    (2, "decode-16"): 1.25,
    (2, "decode-64"): 1.4,
    (2, "prefill-16"): 1.0,
    (1, "decode-8"): 0.95,
    (1, "decode-16"): 0.95,
}
Rates = dict[str, list[float]]


class PeerBench:
    """Both engines, which can be started repeatedly."""

    def __init__(
        self,
        model_dir: Path,
        peer_python: Path,
        driver: Path,
        *,
        cores: Sequence[int],
        dtype: str,
        rounds: int,
        directory: Path,
        workloads: Sequence[Workload] = WORKLOADS,
    ) -> None:
        self._model_dir = model_dir
        self._peer_python = peer_python
        self._driver = driver
        self._cores = tuple(cores)
        self._dtype = dtype
        self._rounds = rounds
        self._directory = directory
        self._workloads = workloads
        self._vocab_size = read_model_config(model_dir).vocab_size

    def run(
        self, starts: int, stage_counts: Sequence[int], say: Callable[[str], None], earlier: Result | None = None
    ) -> Result:
        """Measure; the first engine alternates between starts. Measurements from `earlier` today are kept."""
        machine = this_machine() if earlier is None else earlier.machine
        measured: list[dict[str, Any]] = [] if earlier is None else list(earlier.rounds)
        first = 1 + max((one["start"] for one in measured), default=-1)
        for start in range(first, first + starts):
            for stages in stage_counts:
                engines = (STAGELINE, VLLM) if start % 2 == 0 else (VLLM, STAGELINE)
                for engine in engines:
                    begin = self._start_stageline if engine == STAGELINE else self._start_vllm
                    rates = begin(stages, self._directory / f"{start}-{stages}-{engine}")
                    measured.append({"start": start, "engine": engine, "stages": stages, "rates": rates})
                    shown = ", ".join(f"{name} {median(values):.0f}" for name, values in rates.items())
                    say(f"start {start + 1}/{first + starts}, {engine} P={stages}, tok/s: {shown}")
        return Result(
            program="peers",
            date=today(),
            machine=machine,
            parameters={
                "peer": PEER,
                "model": "SmolLM2-135M-Instruct",
                "dtype": self._dtype,
                "cores": list(self._cores),
                "starts": first + starts,
                "rounds_per_start": self._rounds,
                "workloads": {
                    one.name: f"{one.requests} requests, {one.input_tokens} in, {one.output_tokens} out"
                    for one in self._workloads
                },
            },
            rounds=measured,
            targets=peer_targets(measured),
        )

    def _start_stageline(self, stages: int, directory: Path) -> Rates:
        cores = self._cores[:stages]
        shape = GroupShape(name="stageline", stage_cores=cores, engine_cores=cores, dtype=self._dtype)
        with bench_group(shape, self._model_dir, directory) as group:
            return self._rates(stages, lambda workload: group.run(workload).tokens_per_second)

    def _start_vllm(self, stages: int, directory: Path) -> Rates:
        directory.mkdir(parents=True, exist_ok=True)
        cores = self._cores[:stages]
        bound = "|".join(map(str, cores))
        command = [str(self._peer_python), str(self._driver), "--model", str(self._model_dir), "--cores", bound]
        process = LineProcess(
            f"vllm, P = {stages}",
            [*command, "--stages", str(stages), "--dtype", self._dtype],
            cores=cores,
            environment=vllm_variables(self._peer_python),
            log=directory / "vllm.log",
        )
        try:
            process.answer()

            def rate(workload: Workload) -> float:
                prompts = workload.prompts(self._vocab_size)
                process.order(json.dumps({"prompts": prompts, "output_tokens": workload.output_tokens}))
                answer = json.loads(process.answer())
                return float(answer["output_tokens"] / answer["seconds"])

            return self._rates(stages, rate)
        finally:
            process.close_input()
            process.end(patience_seconds=10.0)

    def _rates(self, stages: int, rate: Callable[[Workload], float]) -> Rates:
        """tok/s of every round, by workload; each workload's first round is a warm-up and does not count."""
        rates: Rates = {}
        for workload in self._workloads:
            if (stages, workload.name) not in TARGETS:
                continue
            rate(workload)
            rates[workload.name] = [round(rate(workload.with_seed(1 + index)), 2) for index in range(self._rounds)]
        return rates


def peer_targets(measured: Sequence[dict[str, Any]]) -> list[Target]:
    """Ratio of Stageline to vLLM for every stage count and workload with a target."""
    targets = []
    for (stages, workload), at_least in TARGETS.items():
        ours, theirs = (start_medians(measured, engine, stages, workload) for engine in (STAGELINE, VLLM))
        ratio = round(median_ratio(ours, theirs), 3) if ours and len(ours) == len(theirs) else None
        targets.append(Target(name=f"P = {stages}, {workload}: Stageline / vLLM", measured=ratio, at_least=at_least))
    return targets


def start_medians(measured: Sequence[dict[str, Any]], engine: str, stages: int, workload: str) -> list[float]:
    """tok/s of one engine and workload: the median of each start, in the order of the starts."""
    return [
        median(one["rates"][workload])
        for one in measured
        if one["engine"] == engine and one["stages"] == stages and workload in one["rates"]
    ]
