"""`make bench ARGS=ranks`: speedup by a stage's ranks over one rank, comparison with vLLM, and the time of one
exchange.

Groups of one rank and of two exist side by side and are measured alternately; ratios are those of pairs, medians over
the rounds. Pinned, one rank has one core (with its engine), and two have one each (the engine floats over both): the
gain of a second core. Unpinned, both have all cores, which a single rank uses by threads.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from stageline_api.errors import UserError
from stageline_bench.runtime.group.bench_group import GroupShape
from stageline_bench.runtime.group.engine_host import RoundOrder
from stageline_bench.runtime.group.line_process import LineProcess
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.peers.peer_environment import PEER
from stageline_bench.runtime.peers.vllm_tensor import STAGELINE, VLLM, TensorPeers
from stageline_bench.runtime.rank_models import DENSE, MIXTURE, Fields, rank_model, trial
from stageline_bench.runtime.record.results import Result, Target, this_machine, today
from stageline_bench.runtime.speculation import Case, measure_cases, targets_of
from stageline_runtime.model_facts.model_config import read_model_config

TENSOR, EXPERT = "tensor", "expert"
TENSOR_FLOOR, EXPERT_FLOOR, VLLM_FLOOR = 1.3, 1.5, 1.0
EXCHANGE_MICROSECONDS_AT_MOST: Final = 30.0
EXCHANGE_ROWS, EXCHANGE_COLUMNS = 8, 576
EXCHANGE_CASE: Final = f"all-reduce of [{EXCHANGE_ROWS}, {EXCHANGE_COLUMNS}] bfloat16"
FULL_REQUESTS, EXPERT_REQUESTS = 8, 16
OUTPUT_TOKENS, EXPERT_OUTPUT_TOKENS = 96, 48
"""A step of the mixture takes twice as long."""
PINNED, UNPINNED = "pinned", "unpinned"
RANKS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBench:
    """Two ranks on two cores. `vllm_python` None omits vLLM; `is_trial`: tiny models, to test the program."""

    cores: Sequence[int]
    rounds: int
    starts: int
    """Starts of either engine, in the comparison with vLLM."""
    cache_dir: Path
    directory: Path
    vllm_python: Path | None
    say: Callable[[str], None]
    is_trial: bool = False

    def run(self) -> Result:
        """All measurements. If vLLM doesn't start, its row is not measured, and its error is in the parameters."""
        machine = this_machine()
        exchanges = self._exchanges()
        dense = self._model("dense", DENSE)
        tensor = self._cases(TENSOR, dense, {1: TENSOR_FLOOR, FULL_REQUESTS: None})
        expert = self._cases(EXPERT, self._model("mixture", MIXTURE), {EXPERT_REQUESTS: EXPERT_FLOOR})
        peers, vllm = self._beside_vllm(dense)
        rounds = [*exchanges, *tensor[0], *expert[0], *peers]
        return Result(
            program="ranks",
            date=today(),
            machine=machine,
            parameters={
                "dense_model": _described(DENSE),
                "mixture": _described(MIXTURE),
                "dtype": "bfloat16",
                "cores": list(self.cores),
                "rounds": self.rounds,
                "vllm": vllm,
                "starts_beside_vllm": self.starts,
            },
            rounds=rounds,
            targets=[*tensor[1], *expert[1], _vllm_target(peers), _exchange_target(exchanges)],
        )

    def _exchanges(self) -> list[dict[str, Any]]:
        """Sums alone, in two otherwise idle processes."""
        listed = ",".join(map(str, self.cores))
        sizes = [str(EXCHANGE_ROWS), str(EXCHANGE_COLUMNS)]
        process = LineProcess(
            "the exchange",
            [sys.executable, "-m", "stageline_bench.runtime.exchange_cost", listed, *sizes],
            cores=self.cores,
            environment={"OMP_NUM_THREADS": "1"},
            log=self.directory / "exchange.log",
        )
        try:
            windows = json.loads(process.answer())["microseconds"]
        finally:
            process.end(patience_seconds=5.0)
        self.say(f"{EXCHANGE_CASE}, us: {json.dumps(windows)}")
        return [{"case": EXCHANGE_CASE, "microseconds": each} for each in windows]

    def _cases(
        self, kind: str, model_dir: Path, floors: dict[int, float | None]
    ) -> tuple[list[dict[str, Any]], list[Target]]:
        cases = rank_cases(kind, read_model_config(model_dir).vocab_size, floors)
        shapes = {
            variant(kind, ranks, placement): rank_shape(kind, ranks, placement, self.cores)
            for ranks in (1, RANKS)
            for placement in (PINNED, UNPINNED)
        }
        measured = measure_cases(model_dir, shapes, cases, self.rounds, self.directory / kind, self.say)
        return measured, targets_of(cases, measured, "P = 1")

    def _beside_vllm(self, model_dir: Path) -> tuple[list[dict[str, Any]], str]:
        if self.vllm_python is None:
            return [], "left out"
        shape = rank_shape(TENSOR, RANKS, PINNED, self.cores)
        peers = TensorPeers(
            model_dir=model_dir, shape=shape, python=self.vllm_python, directory=self.directory / "beside-vllm"
        )
        try:
            return peers.run(
                Workload(name="decode-8", requests=FULL_REQUESTS), self.starts, self.rounds, self.say
            ), PEER
        except UserError as error:
            if not error.message.startswith(VLLM):
                raise
            self.say(error.message)
            return [], f"{PEER} does not start: {error.message}"

    def _model(self, name: str, fields: Fields) -> Path:
        if self.is_trial:
            return rank_model(f"trial-{name}", trial(fields), self.cache_dir)
        return rank_model(f"ranks-{name}", fields, self.cache_dir)


def variant(kind: str, ranks: int, placement: str) -> str:
    """A group's name in results."""
    return f"{kind} {ranks}, {placement}"


def rank_shape(kind: str, ranks: int, placement: str, cores: Sequence[int]) -> GroupShape:
    """One stage with `ranks` ranks, on the first cores or on any."""
    used = tuple(cores[:ranks])
    is_pinned = placement == PINNED
    return GroupShape(
        name=variant(kind, ranks, placement).replace(", ", "-").replace(" ", "-"),
        stage_cores=used[:1],
        rank_cores=used if ranks > 1 else (),
        engine_cores=used if is_pinned else (),
        is_pinned=is_pinned,
        max_num_seqs=EXPERT_REQUESTS,
        tensor=ranks if kind == TENSOR else 1,
        expert=ranks if kind == EXPERT else 1,
    )


def rank_cases(kind: str, vocab_size: int, floors: dict[int, float | None]) -> tuple[Case, ...]:
    """One rank compared with two, for each number of requests; only pinned cases have floors."""
    cases = []
    for requests, floor in floors.items():
        tokens = EXPERT_OUTPUT_TOKENS if kind == EXPERT else OUTPUT_TOKENS
        workload = Workload(name=f"decode-{requests}", requests=requests, output_tokens=tokens)
        prompts = tuple(map(tuple, workload.prompts(vocab_size)))
        order = RoundOrder(prompts=prompts, output_tokens=workload.output_tokens)
        for placement in (PINNED, UNPINNED):
            one, several = variant(kind, 1, placement), variant(kind, RANKS, placement)
            held = {several: floor} if floor is not None and placement == PINNED else {}
            name = f"{kind}, {requests} request{'s' if requests > 1 else ''}, {placement}"
            cases.append(Case(name, order, (one, several), held))
    return tuple(cases)


def _vllm_target(measured: Sequence[dict[str, Any]]) -> Target:
    pairs = [one["tokens_per_second"] for one in measured]
    return Target(
        name=f"{TENSOR} {RANKS}, {FULL_REQUESTS} requests, pinned, P = 1: Stageline / vLLM",
        measured=round(median(one[STAGELINE] / one[VLLM] for one in pairs), 3) if pairs else None,
        at_least=VLLM_FLOOR,
    )


def _exchange_target(measured: Sequence[dict[str, Any]]) -> Target:
    return Target(
        name=f"{EXCHANGE_CASE} over {RANKS} ranks, microseconds, median",
        measured=median(one["microseconds"] for one in measured),
        at_most=EXCHANGE_MICROSECONDS_AT_MOST,
    )


def _described(fields: Fields) -> str:
    sizes = [
        str(fields["model_type"]),
        f"{fields['num_hidden_layers']} layers",
        f"{fields['hidden_size']} and {fields['intermediate_size']} columns",
        f"{fields['num_attention_heads']}/{fields['num_key_value_heads']} heads",
        f"{fields['vocab_size']} tokens",
    ]
    if "num_local_experts" in fields:
        sizes.append(f"{fields['num_local_experts']} experts, {fields['num_experts_per_tok']} a token")
    return f"{', '.join(sizes)}, random weights"


def missed(targets: Sequence[Target]) -> str | None:
    """A sentence that names the missed floors; None if there are none."""
    found = [f"{each.name} is {each.measured:g}, {_wanted(each)} is wanted" for each in targets if each.met is False]
    return f"floors are missed: {'; '.join(found)}" if found else None


def _wanted(target: Target) -> str:
    return f"at least {target.at_least:g}" if target.at_least is not None else f"at most {target.at_most:g}"
