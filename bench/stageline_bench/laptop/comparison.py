"""`make bench-laptop`: llama.cpp and Stageline on one small machine, for one stream, eight and sixteen at once.

llama.cpp uses as many threads as Stageline has stages, on the same cores, with the unchanged GGUF file (4-bit weights);
Stageline uses the same weights converted to bfloat16. Starts alternate; a start runs every workload `rounds` times
after a warm-up. Ratios are medians of pairs.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stageline_bench.laptop.llama_environment import LLAMA
from stageline_bench.runtime.group.bench_group import GroupShape, bench_group
from stageline_bench.runtime.group.line_process import LineProcess
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.peers.peer_bench import STAGELINE, Rates, start_medians
from stageline_bench.runtime.record.figures import median_ratio
from stageline_bench.runtime.record.results import Result, Target, this_machine, today
from stageline_runtime.model_facts.model_config import read_model_config

LLAMA_CPP = "llama.cpp"
DRIVER = Path(__file__).with_name("llama_driver.py")
WORKLOADS = tuple(Workload(name=f"{streams} at once", requests=streams) for streams in (1, 8, 16))
FLOORS: dict[tuple[int, str], float] = {(2, "8 at once"): 1.0, (2, "16 at once"): 1.0}
"""For several streams, which is Stageline's purpose. A single stream is faster on llama.cpp and has no floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaptopBench:
    """Both engines, which can be started repeatedly."""

    model_dir: Path
    gguf: Path
    llama_python: Path
    cores: Sequence[int]
    dtype: str
    rounds: int
    directory: Path

    def run(self, starts: int, say: Callable[[str], None]) -> Result:
        """Measure with one core and with all of them; the first engine alternates between starts."""
        machine = this_machine()
        measured: list[dict[str, Any]] = []
        begin = {STAGELINE: self._start_stageline, LLAMA_CPP: self._start_llama}
        for start in range(starts):
            for stages in sorted({1, len(self.cores)}):
                for engine in (STAGELINE, LLAMA_CPP) if start % 2 == 0 else (LLAMA_CPP, STAGELINE):
                    rates = begin[engine](stages, self.directory / f"{start}-{stages}-{engine}")
                    measured.append({"start": start, "engine": engine, "stages": stages, "rates": rates})
                    shown = ", ".join(f"{name} {median(values):.0f}" for name, values in rates.items())
                    say(f"start {start + 1}/{starts}, {engine} on {stages} cores, tok/s: {shown}")
        return Result(
            program="laptop",
            date=today(),
            machine=machine,
            parameters={
                "peer": LLAMA.replace("==", " "),
                "weights": f"{self.gguf.stem} for llama.cpp, {self.dtype} for Stageline",
                "cores": list(self.cores),
                "starts": starts,
                "rounds_per_start": self.rounds,
                "input_tokens": WORKLOADS[0].input_tokens,
                "output_tokens": WORKLOADS[0].output_tokens,
            },
            rounds=measured,
            targets=_targets(measured),
        )

    def _start_stageline(self, stages: int, directory: Path) -> Rates:
        cores = tuple(self.cores[:stages])
        shape = GroupShape(name="stageline", stage_cores=cores, engine_cores=cores, dtype=self.dtype)
        with bench_group(shape, self.model_dir, directory) as group:
            return self._rates(lambda workload: group.run(workload).tokens_per_second)

    def _start_llama(self, threads: int, directory: Path) -> Rates:
        directory.mkdir(parents=True)
        streams = max(workload.requests for workload in WORKLOADS)
        command = [str(self.llama_python), str(DRIVER), "--model", str(self.gguf), "--streams", str(streams)]
        process = LineProcess(
            f"llama.cpp, {threads} threads",
            [*command, "--threads", str(threads)],
            cores=self.cores[:threads],
            environment={},
            log=directory / "llama.log",
        )
        try:
            process.answer()
            vocab_size = read_model_config(self.model_dir).vocab_size

            def rate(workload: Workload) -> float:
                prompts = workload.prompts(vocab_size)
                process.order(json.dumps({"prompts": prompts, "output_tokens": workload.output_tokens}))
                answer = json.loads(process.answer())
                return float(answer["output_tokens"] / answer["seconds"])

            return self._rates(rate)
        finally:
            process.close_input()
            process.end(patience_seconds=10.0)

    def _rates(self, rate: Callable[[Workload], float]) -> Rates:
        """tok/s of every round, by workload; each workload's first round is a warm-up and does not count."""
        rates: Rates = {}
        for workload in WORKLOADS:
            rate(workload)
            rates[workload.name] = [round(rate(workload.with_seed(1 + index)), 2) for index in range(self.rounds)]
        return rates


def _targets(measured: Sequence[dict[str, Any]]) -> list[Target]:
    targets = []
    for (stages, workload), at_least in FLOORS.items():
        ours, theirs = (start_medians(measured, engine, stages, workload) for engine in (STAGELINE, LLAMA_CPP))
        ratio = round(median_ratio(ours, theirs), 3) if ours and theirs else None
        name = f"{stages} cores, {workload}: Stageline / llama.cpp"
        targets.append(Target(name=name, measured=ratio, at_least=at_least))
    return targets
