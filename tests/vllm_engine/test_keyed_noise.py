"""vLLM's tokens under the logits processor are the own runtime's, however vLLM's batch changes and whoever began."""

import gc
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from oracles import vllm_logits_interface
from oracles.tiny_models import EOS_TOKEN_ID, SPECIAL_TOKENS, VOCAB_SIZE, write_tiny_tokenizer
from stageline_api.engine_http import GRAMMAR_MARK
from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotFill, StepPlan
from stageline_runtime.stage.step.sampling_state import SamplingState
from stageline_vllm.request_draws import VERSION, RequestDraws, as_extra_args

vllm_logits_interface.provide()

from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality  # noqa: E402

from stageline_vllm.plugin.keyed_noise import KeyedNoise  # noqa: E402

PROMPT = (5, 9, 5, 17)
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"enum": ["ab", "cd"]}}, "required": ["n"]})
SAMPLINGS = {
    "temperature": RequestSampling(temperature=0.8, seed=11),
    "another choice": RequestSampling(temperature=0.8, seed=11, choice=3),
    "a large seed": RequestSampling(temperature=1.9, seed=2**63 - 1),
    "top-k": RequestSampling(temperature=1.3, top_k=7, seed=4),
    "top-p": RequestSampling(temperature=1.0, top_p=0.4, seed=5),
    "min-p": RequestSampling(temperature=1.5, min_p=0.2, seed=6),
    "all cuts": RequestSampling(temperature=1.1, top_k=40, top_p=0.8, min_p=0.05, seed=7),
    "penalties": RequestSampling(
        temperature=0.9, seed=8, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=-0.5
    ),
    "greedy with penalties": RequestSampling(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.3),
    "greedy with a bias": RequestSampling(temperature=0.0, logit_bias=((3, 4.0), (8, -100.0))),
    "bias": RequestSampling(temperature=1.0, seed=9, logit_bias=((3, 2.5), (8, -100.0))),
    "a grammar": RequestSampling(temperature=1.7, seed=10, json_schema=SCHEMA),
    "a least length": RequestSampling(temperature=1.0, seed=13, min_tokens=6, end_token_ids=(2, *range(10, 60))),
    "exclusions": RequestSampling(
        temperature=0.0, allowed_token_ids=tuple(range(3, 12)), bad_words=((4,), *((first, 5) for first in range(12)))
    ),
    "all of it": RequestSampling(
        temperature=1.2, top_p=0.95, seed=12, presence_penalty=0.4, logit_bias=((2, 1.0),), json_schema=SCHEMA
    ),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture
def processor(model_dir: Path) -> KeyedNoise:
    return made(model_dir)


MOST_AT_ONCE = 8
WAIT_SECONDS = 60.0
FOREIGN_TOKEN_ID = 0
LATE = (
    GRAMMAR_MARK + 'start: /[a-z]+/ "~" s\ns: /[a-z]/ | "" | ' + " | ".join(" ".join(["s"] * n) for n in range(2, 30))
)
"""Dear behind the first word only."""


def made(model_dir: Path, *, rank: int = 0, stages: int = 1, tensor: int = 1) -> KeyedNoise:
    """Of one worker."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(model_dir), get_vocab_size=lambda: VOCAB_SIZE),
        parallel_config=SimpleNamespace(rank=rank, pipeline_parallel_size=stages, tensor_parallel_size=tensor),
        scheduler_config=SimpleNamespace(max_num_seqs=MOST_AT_ONCE),
    )
    return KeyedNoise(config, torch.device("cpu"), False)


def token_of(letter: str) -> int:
    return len(SPECIAL_TOKENS) + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter)


def bordered(sampling: RequestSampling, num_prompt_tokens: int = len(PROMPT)) -> RequestSampling:
    return msgspec.structs.replace(sampling, num_prompt_tokens=num_prompt_tokens)


def model_logits(ids: list[int]) -> Tensor:
    """A model: logits that follow from all ids so far."""
    generator = torch.Generator().manual_seed(hash(tuple(ids)) % 2**31)
    return torch.randn(VOCAB_SIZE, generator=generator) * 3.0


def own_answer(model_dir: Path, sampling: RequestSampling, length: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """What the own runtime's last stage samples."""
    state = SamplingState(GuideMaker(JsonGrammars(model_dir, VOCAB_SIZE, [EOS_TOKEN_ID])))
    ids = list(prompt)
    for seq in range(length):
        position, inputs = (0, prompt) if seq == 0 else (len(ids) - 1, ())
        row = PlanRow(0, 1, position, max(1, len(inputs)), inputs, True)
        fills = (SlotFill(0, 1, bordered(sampling, len(prompt))),) if seq == 0 else ()
        plan = StepPlan(seq, 0, fills, (row,), 8, -1, False, False)
        state.accept(plan)
        drawn, _ = state.sample(plan, model_logits(ids)[None].clone())
        sampled = drawn.rows()
        assert sampled[0].failure is None, sampled
        ids.append(sampled[0].token)
        if ids[-1] == EOS_TOKEN_ID:
            break
    return ids[len(prompt) :]


@dataclass
class VllmRequest:
    """One request as vLLM's worker holds it."""

    prompt: list[int]
    params: Any
    output: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        sampling: RequestSampling | None,
        number: int,
        prompt: tuple[int, ...],
        *generated: int,
        awaits_grammar: bool = False,
    ) -> "VllmRequest":
        """`sampling` None: plain greedy, without draws."""
        extra = None
        if sampling is not None:
            draws = RequestDraws(VERSION, number, bordered(sampling, len(prompt)), (EOS_TOKEN_ID,), awaits_grammar)
            extra = json.loads(json.dumps(as_extra_args(draws)))
        params = SimpleNamespace(
            extra_args=extra, temperature=0.0, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0
        )
        KeyedNoise.validate_params(params)
        return cls([*prompt, *generated], params)

    @property
    def ended(self) -> bool:
        return self.output[-1:] == [EOS_TOKEN_ID]


class VllmBatch:
    """vLLM's persistent batch, as its first model runner keeps it: unscheduled rows leave, holes are filled."""

    def __init__(self, processor: KeyedNoise) -> None:
        self._processor = processor
        self._rows: list[VllmRequest] = []

    def step(self, scheduled: list[VllmRequest]) -> None:
        removed = [place for place, row in enumerate(self._rows) if row not in scheduled]
        rows: list[VllmRequest | None] = [None if place in removed else row for place, row in enumerate(self._rows)]
        added = []
        for request in scheduled:
            if request in self._rows:
                continue
            place = removed.pop(0) if removed else len(rows)
            rows[place : place + 1] = [request]
            request.output = list(request.output)  # a request that comes back has a list of its own
            added.append((place, request.params, request.prompt, request.output))
        moved = []
        while None in rows:
            hole = rows.index(None)
            last = max(place for place, row in enumerate(rows) if row is not None)
            if last > hole:
                rows[hole], rows[last] = rows[last], None
                moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
            rows = [row for row in rows if row is not None] if last < hole else rows
        kept = [row for row in rows if row is not None]
        if len(kept) > 1:
            kept[0], kept[-1] = kept[-1], kept[0]
            moved.append((0, len(kept) - 1, MoveDirectionality.SWAP))
        changed = bool(removed or added or moved)
        self._processor.update_state(BatchUpdate(len(kept), removed, added, moved) if changed else None)
        self._rows = kept
        logits = torch.stack([model_logits(row.prompt + row.output) for row in kept])
        for row, token in zip(kept, self._processor.apply(logits).argmax(dim=-1).tolist(), strict=True):
            row.output.append(token)


def answer(batch: VllmBatch, request: VllmRequest, length: int) -> list[int]:
    while len(request.output) < length and not request.ended:
        batch.step([request])
    return request.output


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_the_own_runtime(processor: KeyedNoise, model_dir: Path, name: str) -> None:
    expected = own_answer(model_dir, SAMPLINGS[name], 24)
    assert answer(VllmBatch(processor), VllmRequest.of(SAMPLINGS[name], 1, PROMPT), 24) == expected


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_answer_goes_on_in_another_group_where_it_was_left(model_dir: Path, name: str) -> None:
    expected = own_answer(model_dir, SAMPLINGS[name], 24)
    for cut in range(1, len(expected)):
        fresh = made(model_dir)
        request = VllmRequest.of(SAMPLINGS[name], 1, PROMPT, *expected[:cut])
        assert answer(VllmBatch(fresh), request, 24 - cut) == expected[cut:], f"left after {cut} tokens"


@pytest.mark.parametrize("seed", range(6))
def test_a_batch_that_changes_every_step_changes_no_answer(processor: KeyedNoise, model_dir: Path, seed: int) -> None:
    chooser = random.Random(seed)
    samplings = [*SAMPLINGS.values(), None]
    prompts = [tuple(chooser.randrange(VOCAB_SIZE) for _ in range(chooser.randint(1, 9))) for _ in samplings]
    requests = [VllmRequest.of(each, 100 + n, prompts[n]) for n, each in enumerate(samplings)]
    batch = VllmBatch(processor)
    while waiting := [each for each in requests if len(each.output) < 12 and not each.ended]:
        batch.step(chooser.sample(waiting, chooser.randint(1, len(waiting))))
    for sampling, prompt, request in zip(samplings, prompts, requests, strict=True):
        plain = RequestSampling(temperature=0.0)
        assert request.output == own_answer(model_dir, sampling or plain, 12, prompt), sampling


def test_requests_that_are_over_hold_no_memory(model_dir: Path) -> None:
    """vLLM says alike of one that is over and of one that only sits out a step; so few are kept, and no ids of them."""
    processor = made(model_dir)
    batch = VllmBatch(processor)
    sampling = SAMPLINGS["penalties"]
    left_out = VllmRequest.of(sampling, 1, PROMPT)
    batch.step([left_out])
    prompts = []
    for number in range(2, 50):
        request = VllmRequest.of(sampling, number, (number,) * 100)
        prompts.append(request.prompt)
        batch.step([request])
    batch.step([VllmRequest.of(None, 0, PROMPT)])
    gc.collect()
    holders = [each for each in gc.get_objects() if type(each).__name__ == "_Row" and each.position < 1000]
    mine = [row for row in holders if any(row._prompt is prompt for prompt in prompts)]
    assert mine == [], "the ids of those that left are vLLM's alone"
    assert len(processor._draws._kept) <= 2 * MOST_AT_ONCE
    assert answer(batch, left_out, 24) == own_answer(model_dir, sampling, 24), "forgotten meanwhile, and followed anew"


@pytest.mark.parametrize(("rank", "samples"), [(0, False), (1, False), (2, True), (3, True)])
def test_only_workers_of_the_last_stage_follow_requests(model_dir: Path, rank: int, samples: bool) -> None:
    """The others are shown the batch too, and never asked for a token."""
    processor = made(model_dir, rank=rank, stages=2, tensor=2)
    request = VllmRequest.of(SAMPLINGS["a grammar"], 1, PROMPT)
    processor.update_state(BatchUpdate(1, [], [(0, request.params, request.prompt, request.output)], []))
    assert len(processor._draws._kept) == samples


def test_alternating_cohorts_follow_a_history_once_only(processor: KeyedNoise, model_dir: Path) -> None:
    sampling = SAMPLINGS["penalties"]
    both = [VllmRequest.of(sampling, number, (number, 2)) for number in (1, 2)]
    batch = VllmBatch(processor)
    for request in itertools.islice(itertools.cycle(both), 40):
        batch.step([request])
    assert [each.output for each in both] == [own_answer(model_dir, sampling, 20, (n, 2)) for n in (1, 2)]


def test_a_prompt_in_chunks_is_drawn_from_in_vain_until_its_last(processor: KeyedNoise, model_dir: Path) -> None:
    request = VllmRequest.of(SAMPLINGS["penalties"], 1, PROMPT)
    batch = VllmBatch(processor)
    for _ in range(3):  # vLLM drops what it samples of a prompt that is not complete
        batch.step([request])
        request.output.clear()
    assert answer(batch, request, 24) == own_answer(model_dir, SAMPLINGS["penalties"], 24)


def test_where_the_grammar_is_lost_a_token_is_left_that_none_admits(processor: KeyedNoise) -> None:
    # Output that the grammar does not admit can't come from a group of ours; no token may follow it.
    request = VllmRequest.of(SAMPLINGS["a grammar"], 1, PROMPT, 3, 3, 3)
    assert answer(VllmBatch(processor), request, 5) == [FOREIGN_TOKEN_ID] * 5


def test_a_grammar_that_takes_too_long_is_no_end_of_the_answer_where_one_may_be(processor: KeyedNoise) -> None:
    """It would look as if the model had ended there."""
    sampling = RequestSampling(temperature=1.0, seed=1, json_schema=LATE)
    request = VllmRequest.of(sampling, 1, PROMPT, *map(token_of, "a~"))
    neighbour = VllmRequest.of(SAMPLINGS["temperature"], 2, PROMPT)
    batch = VllmBatch(processor)
    batch.step([request, neighbour])
    assert request.output == [FOREIGN_TOKEN_ID]
    assert not neighbour.ended


def test_no_step_waits_until_a_grammar_is_compiled(processor: KeyedNoise, model_dir: Path) -> None:
    sampling = SAMPLINGS["a grammar"]
    awaiting = VllmRequest.of(sampling, 1, PROMPT, awaits_grammar=True)
    neighbour = VllmRequest.of(SAMPLINGS["temperature"], 2, PROMPT)
    batch = VllmBatch(processor)
    with processor._draws._guide_maker((EOS_TOKEN_ID,)).grammars._compiling:  # another's takes long
        for _ in range(3):
            batch.step([awaiting, neighbour])
        assert EOS_TOKEN_ID not in awaiting.output
    deadline = time.monotonic() + WAIT_SECONDS
    while not awaiting.ended:
        assert time.monotonic() < deadline, "it was never compiled"
        batch.step([awaiting])
    request = VllmRequest.of(sampling, 1, PROMPT)
    with processor._draws._guide_maker((EOS_TOKEN_ID,)).grammars._compiling:
        assert answer(batch, request, 24) == own_answer(model_dir, sampling, 24), "held under its number"
    assert answer(batch, neighbour, 24) == own_answer(model_dir, SAMPLINGS["temperature"], 24)


def test_grammars_that_nobody_waits_for_any_more_are_not_compiled(processor: KeyedNoise) -> None:
    """Or requests that come and go would have all others wait in that line."""
    batch = VllmBatch(processor)
    with processor._draws._guide_maker((EOS_TOKEN_ID,)).grammars._compiling:
        for number in range(1, 60):
            sampling = RequestSampling(temperature=1.0, json_schema=json.dumps({"const": number}))
            batch.step([VllmRequest.of(sampling, number, (EOS_TOKEN_ID,), awaits_grammar=True)])
        waiting = processor._draws._guide_maker((EOS_TOKEN_ID,))._thread._work_queue.qsize()
        futures = [row.slot.guide.compiled for row in processor._draws._kept.values() if row.slot.guide is not None]
    assert waiting > len(futures), "which are passed over when their turn comes"
    assert len(futures) == 2 * MOST_AT_ONCE
    for future in futures:
        future.result(WAIT_SECONDS)
    kept = processor._draws._guide_maker((EOS_TOKEN_ID,)).grammars._kept
    assert len(kept) <= len(futures) + 1, "the first was being compiled"


def test_hidden_ids_of_the_output_end_the_step_and_not_the_truth(processor: KeyedNoise) -> None:
    request = VllmRequest.of(SAMPLINGS["penalties"], 1, PROMPT)
    batch = VllmBatch(processor)
    batch.step([request])
    request.output[-1] = -1
    with pytest.raises(AssertionError, match="vLLM shows no ids"):
        batch.step([request])


@pytest.mark.parametrize(
    ("field_name", "value", "told"),
    [
        ("temperature", 0.5, "temperature is 0.5"),
        ("presence_penalty", 0.1, "presence_penalty is 0.1"),
        ("extra_args", {"stageline_draws": [VERSION + 1]}, f"version {VERSION + 1}"),
        ("extra_args", {"stageline_draws": {"seed": 1}}, "version None"),
        ("extra_args", {"stageline_draws": [VERSION, "x", [], []]}, "stageline_draws: "),
    ],
)
def test_draws_that_would_be_undone_or_misread_are_refused(field_name: str, value: Any, told: str) -> None:
    params = VllmRequest.of(SAMPLINGS["top-k"], 1, PROMPT).params
    setattr(params, field_name, value)
    with pytest.raises(ValueError, match=told):
        KeyedNoise.validate_params(params)


def test_it_is_no_invariant_of_argmax(processor: KeyedNoise) -> None:
    assert not processor.is_argmax_invariant()
