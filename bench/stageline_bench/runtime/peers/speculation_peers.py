"""Drafts by lookup compared with those of Hugging Face (`prompt_lookup_num_tokens`) and vLLM (`ngram`): the same
prompts, one request, one core; each engine with and without, one after the other.

A rate counts from the first token of an answer to its last. Peers report only at the end, so they are asked once for a
single token and once for the whole answer. Each engine is only compared with itself: the gain of its lookup.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import transformers

from stageline_api.errors import UserError
from stageline_bench.runtime.group.bench_group import GroupShape, bench_group
from stageline_bench.runtime.group.engine_host import RoundOrder
from stageline_bench.runtime.group.line_process import LineProcess
from stageline_bench.runtime.peers.peer_environment import PEER, VLLM_DRIVER, vllm_variables
from stageline_bench.runtime.peers.vllm_tensor import first_exception
from stageline_bench.runtime.record.results import Result, this_machine, today
from stageline_bench.runtime.speculation import DRAFTING, DRAFTS, PLAIN, prompt_orders

STAGELINE, HUGGING_FACE, VLLM = "Stageline", "Hugging Face", "vLLM"
ENGINES = (STAGELINE, HUGGING_FACE, VLLM)
PEER_DRAFTS: Final = 10
"""The initial value that both peers' documentation recommends."""
CONTEXT_TOKENS: Final = 2048
Rate = Callable[[RoundOrder], float]


class SpeculationPeers:
    """All three engines of one model on one core."""

    def __init__(self, model_dir: Path, vllm_python: Path, *, core: int, dtype: str, directory: Path) -> None:
        self._model_dir = model_dir
        self._vllm_python = vllm_python
        self._core = core
        self._dtype = dtype
        self._directory = directory

    def run(self, rounds: int, say: Callable[[str], None]) -> Result:
        """Measure every prompt on every engine `rounds` times, and report vLLM's behaviour with a pipeline."""
        machine = this_machine()
        orders = prompt_orders(self._model_dir)
        measured: list[dict[str, Any]] = []
        for engine in ENGINES:
            # One engine at a time, with its two variants side by side; each waits while the other runs.
            with ExitStack() as ends:
                rates = {name: ends.enter_context(self._running(engine, name)) for name in (PLAIN, DRAFTS)}
                for name, order in orders.items():
                    for rate in rates.values():
                        rate(order)  # warm
                    for index in range(rounds):
                        turn = (PLAIN, DRAFTS) if index % 2 == 0 else (DRAFTS, PLAIN)
                        found = {each: round(rates[each](order), 2) for each in turn}
                        measured.append({"engine": engine, "case": name, "tokens_per_second": found})
                        say(f"{engine}, {name}, round {index + 1}/{rounds}: {json.dumps(found)}")
        over_two = self._vllm_over_two_stages()
        say(f"vLLM's ngram over two stages: {over_two}")
        return Result(
            program="speculation-peers",
            date=today(),
            machine=machine,
            parameters={
                "model": self._model_dir.name,
                "dtype": self._dtype,
                "core": self._core,
                "rounds": rounds,
                "peers": f"transformers {transformers.__version__}, {PEER}",
                "peers' drafts": PEER_DRAFTS,
                "vllm_over_two_stages": over_two,
            },
            rounds=measured,
            targets=[],
        )

    @contextmanager
    def _running(self, engine: str, variant: str) -> Iterator[Rate]:
        directory = self._directory / f"{engine}-{variant}".replace(" ", "-")
        directory.mkdir(parents=True)
        if engine == STAGELINE:
            with self._stageline(variant, directory) as rate:
                yield rate
            return
        drafts = PEER_DRAFTS if variant == DRAFTS else 0
        command = self._hugging_face(drafts) if engine == HUGGING_FACE else self._vllm(drafts, stages=1)
        process = self._process(f"{engine}, {variant}", command, [self._core], directory)
        try:
            process.answer()
            yield lambda order: _decode_rate(process, order)
        finally:
            process.close_input()
            process.end(patience_seconds=10.0)

    @contextmanager
    def _stageline(self, variant: str, directory: Path) -> Iterator[Rate]:
        shape = GroupShape(
            name=variant,
            stage_cores=(self._core,),
            engine_cores=(self._core,),
            dtype=self._dtype,
            max_model_len=CONTEXT_TOKENS,
            speculative=DRAFTING if variant == DRAFTS else None,
        )
        with bench_group(shape, self._model_dir, directory) as group:
            yield lambda order: 1.0 / group.run_order(order).mean_tpot_seconds

    def _hugging_face(self, drafts: int) -> list[str]:
        driver = Path(__file__).with_name("hf_offline.py")
        given = ["--model", str(self._model_dir), "--dtype", self._dtype, "--lookup", str(drafts)]
        return [sys.executable, str(driver), *given]

    def _vllm(self, drafts: int, *, stages: int) -> list[str]:
        cores = "|".join(str(self._core + stage) for stage in range(stages))
        given = ["--model", str(self._model_dir), "--cores", cores, "--stages", str(stages), "--dtype", self._dtype]
        return [
            str(self._vllm_python),
            str(VLLM_DRIVER),
            *given,
            "--max-model-len",
            str(CONTEXT_TOKENS),
            "--ngram",
            str(drafts),
        ]

    def _process(self, name: str, command: Sequence[str], cores: Sequence[int], directory: Path) -> LineProcess:
        environment = vllm_variables(self._vllm_python)
        return LineProcess(name, command, cores=cores, environment=environment, log=directory / "log")

    def _vllm_over_two_stages(self) -> str:
        """Whether vLLM's lookup starts with a pipeline, or the error line of its end."""
        directory = self._directory / "vllm-two-stages"
        directory.mkdir()
        cores = [self._core, self._core + 1]
        process = self._process("vLLM, P = 2", self._vllm(PEER_DRAFTS, stages=2), cores, directory)
        try:
            process.answer()
        except UserError:
            return f"does not start: {first_exception(directory / 'log')}"
        finally:
            process.close_input()
            process.end(patience_seconds=10.0)
        return "starts"


def ratios(rounds: Sequence[dict[str, Any]], engine: str, case: str) -> tuple[float, float, float] | None:
    """Tokens per second without and with drafts, and the ratio, as medians; None if it was not measured."""
    found = [one["tokens_per_second"] for one in rounds if (one["engine"], one["case"]) == (engine, case)]
    if not found:
        return None
    plain, drafts = (median(one[name] for one in found) for name in (PLAIN, DRAFTS))
    return plain, drafts, median(one[DRAFTS] / one[PLAIN] for one in found)


def _decode_rate(process: LineProcess, order: RoundOrder) -> float:
    """Tokens per second of an answer after its first token."""
    first, whole = (
        _answer(process, order.model_copy(update={"output_tokens": tokens})) for tokens in (1, order.output_tokens)
    )
    return float((whole["output_tokens"] - first["output_tokens"]) / (whole["seconds"] - first["seconds"]))


def _answer(process: LineProcess, order: RoundOrder) -> dict[str, Any]:
    process.order(order.model_dump_json())
    return dict(json.loads(process.answer()))
