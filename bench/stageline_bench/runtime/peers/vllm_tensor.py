"""vLLM with `--tensor-parallel-size`, one rank per core, compared with ranks of a stage on the same model, cores and
prompts.

Starts of the two alternate; a start's figure is the median of its rounds, and its partner is the adjacent start of the
other. If vLLM doesn't start, its error replaces its figures.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stageline_api.errors import UserError
from stageline_bench.runtime.group.bench_group import GroupShape, bench_group
from stageline_bench.runtime.group.line_process import LineProcess
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.peers.peer_environment import VLLM_DRIVER, vllm_variables
from stageline_runtime.model_facts.model_config import read_model_config

STAGELINE, VLLM = "Stageline", "vLLM"
Rate = Callable[[Workload], float]
"""Output tokens per second of one round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPeers:
    model_dir: Path
    shape: GroupShape
    """Of Stageline's group; its ranks use the same cores as vLLM's."""
    python: Path
    """vLLM's interpreter."""
    directory: Path

    def run(self, workload: Workload, starts: int, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
        """Pairs of starts, in alternating order.

        Raises:
            UserError: one of the two doesn't start, or ended; the message contains its last output.
        """
        measured = []
        for start in range(starts):
            rates: dict[str, float] = {}
            for engine in (STAGELINE, VLLM) if start % 2 == 0 else (VLLM, STAGELINE):
                running = self._stageline if engine == STAGELINE else self._vllm
                with running(self.directory / f"{start}-{engine}") as rate:
                    rate(workload)  # warm
                    rates[engine] = round(median(rate(workload.with_seed(1 + n)) for n in range(rounds)), 2)
            pair = {VLLM: rates[VLLM], STAGELINE: rates[STAGELINE]}
            measured.append({"case": self.case(workload), "tokens_per_second": pair})
            say(f"start {start + 1}/{starts}, {self.case(workload)}: {json.dumps(rates)}")
        return measured

    def case(self, workload: Workload) -> str:
        return f"beside vLLM, tensor {self.shape.tensor}, {workload.requests} requests, pinned"

    @contextmanager
    def _stageline(self, directory: Path) -> Iterator[Rate]:
        with bench_group(self.shape, self.model_dir, directory) as group:
            yield lambda workload: group.run(workload).tokens_per_second

    @contextmanager
    def _vllm(self, directory: Path) -> Iterator[Rate]:
        directory.mkdir(parents=True)
        process = vllm_process(self.python, self.model_dir, self.shape, log=directory / "vllm.log")
        vocab_size = read_model_config(self.model_dir).vocab_size

        def rate(workload: Workload) -> float:
            order = {"prompts": workload.prompts(vocab_size), "output_tokens": workload.output_tokens}
            process.order(json.dumps(order))
            answer = json.loads(process.answer())
            return float(answer["output_tokens"] / answer["seconds"])

        try:
            process.answer()
            yield rate
        except UserError as error:
            raise UserError(f"vLLM: {first_exception(directory / 'vllm.log')}", error.exit_code) from error
        finally:
            process.close_input()
            process.end(patience_seconds=10.0)


def vllm_process(python: Path, model_dir: Path, shape: GroupShape, *, log: Path) -> LineProcess:
    """vLLM on the cores of the shape's ranks; it answers once it is ready."""
    cores = shape.rank_cores
    command = [str(python), str(VLLM_DRIVER), "--model", str(model_dir), "--no-tokenizer"]
    command += ["--tensor", str(len(cores)), "--cores", "|".join(map(str, cores)), "--dtype", shape.dtype]
    return LineProcess(
        f"vLLM, tensor {len(cores)}",
        command,
        cores=cores,
        environment=vllm_variables(python),
        log=log,
    )


def first_exception(log: Path) -> str:
    """The first exception in a log: later ones are consequences."""
    lines = [line.split("] ")[-1].strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return first_cause(lines)


def first_cause(lines: Sequence[str]) -> str:
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (named[:1] or lines[-1:] or ["no word"])[0][:300]
