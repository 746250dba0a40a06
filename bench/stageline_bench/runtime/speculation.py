"""Speedup and cost of drafts: the same prompts with and without, alternately, on real layers and on paced stages.

Every figure is a ratio of tokens per second between first and last token, over the same without drafts, of two groups
that are measured right after each other; the order rotates between rounds. Answers end where the model ends them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from stageline_api.engine_http import ChatMessage, ChatPrompt
from stageline_api.runtime_config import SpeculativeConfig
from stageline_bench.runtime.group.bench_group import BenchGroup, GroupShape, bench_group
from stageline_bench.runtime.group.engine_host import RoundOrder
from stageline_bench.runtime.paced import write_paced_model
from stageline_bench.runtime.record.others import OthersClock
from stageline_bench.runtime.record.results import Result, Target, this_machine, today
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.model_facts.model_config import read_model_config

PROMPTS = Path(__file__).with_name("speculation_prompts.json")
FLOORS = {"repeat": 2.0, "spelling": 2.0, "rename": 1.3, "summary": 1.2, "json": 0.97, "chat": 0.97}
WRONG_FLOOR, FULL_FLOOR = 0.93, 0.98
PACED_FLOOR, PACED_ACCEPTANCE = 2.2, 0.7
"""At 20 ms per step and 1 ms per token the maximum for any row length is 2.36."""
FLOOR_STAGES, PACED_FLOOR_STAGES = 2, 4
"""Pipeline lengths with floors."""
FULL_REQUESTS = 16
PLAIN, DRAFTS, WRONG = "plain", "drafts", "wrong"
DRAFTING = SpeculativeConfig()


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    order: RoundOrder
    variants: tuple[str, ...]
    """Measured groups; the first is the baseline."""
    floors: dict[str, float]
    """By variant."""


def run_speculation(
    model_dir: Path,
    *,
    stages: Sequence[int],
    cores: Sequence[int],
    rounds: int,
    dtype: str,
    directory: Path,
    say: Callable[[str], None],
) -> Result:
    """Measure every case `rounds` times on pipelines of each of `stages`, one after the other, on the first of
    `cores`.
    """
    machine = this_machine()
    orders = prompt_orders(model_dir)
    measured: list[dict[str, Any]] = []
    targets: list[Target] = []
    for length in stages:
        cases = speculation_cases(orders, length)
        variants = dict.fromkeys(name for case in cases for name in case.variants)
        shapes = {name: _shape(name, cores[:length], dtype) for name in variants}
        found = measure_cases(model_dir, shapes, cases, rounds, directory / str(length), say)
        measured += found
        targets += targets_of(cases, found)
    return Result(
        program="speculation",
        date=today(),
        machine=machine,
        parameters={
            "model": model_dir.name,
            "dtype": dtype,
            "stages": list(stages),
            "cores": list(cores),
            "rounds": rounds,
            "tokens": 15,
        },
        rounds=measured,
        targets=targets,
    )


def run_paced_speculation(
    *,
    stages: Sequence[int],
    cores: Sequence[int],
    rounds: int,
    output_tokens: int,
    seconds_per_step: float,
    seconds_per_token: Sequence[float],
    directory: Path,
    say: Callable[[str], None],
) -> Result:
    """One request over paced stages, without drafts and with them.

    `stages`: lengths of the measured pipelines, one after the other; their stages share `cores`. `seconds_per_token`:
    times of a row's tokens, each measured with all lengths.
    """
    machine = this_machine()
    order = RoundOrder(prompts=((5,) * 16,), output_tokens=output_tokens)
    scripted = ("--acceptance", str(PACED_ACCEPTANCE))
    measured: list[dict[str, Any]] = []
    targets: list[Target] = []
    for length, token_seconds in product(stages, seconds_per_token):
        command = ("-m", "stageline_bench.runtime.group.paced_stage", str(seconds_per_step), str(token_seconds))
        is_first = token_seconds == seconds_per_token[0]
        cases = (paced_case(order, length, token_seconds, has_floor=is_first),)
        stage_cores = [cores[stage % len(cores)] for stage in range(length)]
        shapes = {
            name: replace(_shape(name, stage_cores, "bfloat16"), stage_command=command, engine_options=options)
            for name, options in {PLAIN: (), DRAFTS: scripted}.items()
        }
        place = directory / f"{length}-{token_seconds}"
        model_dir = write_paced_model(place / "model", length)
        measured += measure_cases(model_dir, shapes, cases, rounds, place, say)
        targets += targets_of(cases, measured, "one request")
    return Result(
        program="paced-speculation",
        date=today(),
        machine=machine,
        parameters={
            "stages": list(stages),
            "seconds_per_step": seconds_per_step,
            "seconds_per_token": list(seconds_per_token),
            "output_tokens": output_tokens,
            "acceptance": PACED_ACCEPTANCE,
            "rounds": rounds,
        },
        rounds=measured,
        targets=targets,
    )


def paced_case(order: RoundOrder, stages: int, token_seconds: float, *, has_floor: bool) -> Case:
    """A case of a pipeline of `stages` stages; only one of four has a floor."""
    floors = {DRAFTS: PACED_FLOOR} if has_floor and stages == PACED_FLOOR_STAGES else {}
    name = f"paced, P = {stages}, {token_seconds * 1e3:g} ms a token, with drafts"
    return Case(name, order, (PLAIN, DRAFTS), floors)


def _shape(name: str, cores: Sequence[int], dtype: str) -> GroupShape:
    return GroupShape(
        name=name.replace(" ", "-"),
        stage_cores=tuple(cores),
        dtype=dtype,
        max_num_seqs=FULL_REQUESTS,
        speculative=None if name == PLAIN else DRAFTING,
        engine_options=("--acceptance", "0") if name == WRONG else (),
    )


def speculation_cases(orders: Mapping[str, RoundOrder], stages: int) -> tuple[Case, ...]:
    """One request and four of each prompt; with the floors' number of stages also drafts that are always wrong and a
    full group.
    """
    where, both, is_floored = f"P = {stages}", (PLAIN, DRAFTS), stages == FLOOR_STAGES
    single = [
        Case(f"{name}, {where}", order, both, {DRAFTS: FLOORS[name]} if is_floored else {})
        for name, order in orders.items()
    ]
    four = [
        Case(f"{name}, 4 requests, {where}", order.model_copy(update={"prompts": order.prompts * 4}), both, {})
        for name, order in orders.items()
    ]
    if not is_floored:
        return (*single, *four)
    everything = [order.prompts[0] for order in orders.values()] * FULL_REQUESTS
    full = orders["chat"].model_copy(update={"prompts": tuple(everything[:FULL_REQUESTS])})
    return (
        *single,
        Case(f"chat, drafts always wrong, {where}", orders["chat"], (PLAIN, WRONG), {WRONG: WRONG_FLOOR}),
        Case(f"all prompts, {FULL_REQUESTS} requests, {where}", full, both, {DRAFTS: FULL_FLOOR}),
        *four,
    )


def chat_order(model_dir: Path) -> RoundOrder:
    """One request of free chat."""
    return prompt_orders(model_dir)["chat"]


def prompt_orders(model_dir: Path) -> dict[str, RoundOrder]:
    """One request of each prompt, by its name."""
    model = read_model_config(model_dir)
    reader = PromptReader.load(
        model_dir, vocab_size=model.vocab_size, max_model_len=2048, eos_token_ids=model.eos_token_ids
    )
    written: dict[str, Any] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    ends = tuple(sorted(model.eos_token_ids))
    return {
        name: RoundOrder(
            prompts=(reader.render_prompt(ChatPrompt(messages=(ChatMessage(role="user", content=each["text"]),))),),
            output_tokens=each["tokens"],
            stop_token_ids=ends,
        )
        for name, each in written.items()
    }


def measure_cases(
    model_dir: Path,
    shapes: dict[str, GroupShape],
    cases: Sequence[Case],
    rounds: int,
    directory: Path,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Each case `rounds` times on groups of its variants' shapes, all of one model."""
    measured: list[dict[str, Any]] = []
    with ExitStack() as ends:
        groups = {
            name: ends.enter_context(bench_group(shape, model_dir, directory / shape.name))
            for name, shape in shapes.items()
        }
        for case in cases:
            for name in case.variants:
                groups[name].run_order(case.order)  # warm up sockets, caches, the CPU's clock
        for index in range(rounds):
            for case in cases:
                measured.append(_one(groups, case, index))
                say(f"round {index + 1}/{rounds}, {case.name}: {json.dumps(measured[-1]['tokens_per_second'])}")
    return measured


def _one(groups: dict[str, BenchGroup], case: Case, index: int) -> dict[str, Any]:
    """One case on all its groups, in rotating order."""
    turn = index % len(case.variants)
    rates: dict[str, float] = {}
    others: dict[str, float] = {}
    outputs = {}
    for name in case.variants[turn:] + case.variants[:turn]:
        clock = OthersClock()
        report = groups[name].run_order(case.order)
        others[name] = round(clock.seconds(), 2)
        rates[name] = round(1.0 / report.mean_tpot_seconds, 2)
        outputs[name] = report.outputs
    first = outputs[case.variants[0]]
    equal = sum(one == other for name in case.variants[1:] for one, other in zip(first, outputs[name], strict=True))
    answers = len(first) * (len(case.variants) - 1)
    return {
        "case": case.name,
        "tokens_per_second": rates,
        "cpu_seconds_of_others": others,
        "equal_answers": equal,
        "answers": answers,
    }


def targets_of(cases: Sequence[Case], measured: list[dict[str, Any]], where: str = "") -> list[Target]:
    """The cases' floors compared with the medians of their pairs; `where` is added to their names."""
    targets = []
    for case in cases:
        for name, floor in case.floors.items():
            pairs = [one["tokens_per_second"] for one in measured if one["case"] == case.name]
            ratio = median(one[name] / one[case.variants[0]] for one in pairs)
            named = f"{case.name}, {where}" if where else case.name
            what = f"{named}: tokens per second, {name} / {case.variants[0]}"
            targets.append(Target(name=what, measured=round(ratio, 3), at_least=floor))
    return targets
