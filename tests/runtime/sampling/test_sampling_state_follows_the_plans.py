"""The last stage's per-slot history: chunks, the border between prompt and output, slot reuse, rows that run dead."""

import torch

from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotFill, StepPlan
from stageline_runtime.stage.step.sampling_state import SamplingState

VOCAB_SIZE = 16
_LOGITS = torch.arange(VOCAB_SIZE, 0, -1, dtype=torch.float32)[None]
"""Greedy without penalties: token 0."""


def presence(num_prompt_tokens: int) -> RequestSampling:
    """Greedy that never says a token twice: a presence penalty and a bias large enough on any difference here."""
    return RequestSampling(0.0, 1.0, 0, 0, 0, frequency_penalty=100.0, num_prompt_tokens=num_prompt_tokens)


def plan(seq: int, *rows: PlanRow, fills: tuple[SlotFill, ...] = ()) -> StepPlan:
    return StepPlan(seq, 0, fills, rows, sum(row.num_tokens for row in rows), -1, False, False)


def chunk(generation: int, position: int, *token_ids: int, need_sample: bool = True) -> PlanRow:
    return PlanRow(3, generation, position, len(token_ids), token_ids, need_sample)


def decode(generation: int, position: int) -> PlanRow:
    return PlanRow(3, generation, position, 1, (), True)


def step(state: SamplingState, of: StepPlan) -> list[int]:
    state.accept(of)
    drawn, feedback = state.sample(of, _LOGITS.repeat(len(of.sampled_rows), 1))
    sampled = drawn.rows()
    assert feedback.tolist() == [[row.token] for row in sampled]
    return [row.token for row in sampled]


def test_prompt_tokens_are_not_output_but_tokens_behind_the_border_are() -> None:
    state = SamplingState()
    first = plan(0, chunk(1, 0, 0, 1, need_sample=False), fills=(SlotFill(3, 1, presence(3)),))
    state.accept(first)
    # Position 2 is the prompt's last token; 1 and 2 were generated before this slot was filled.
    assert step(state, plan(1, chunk(1, 2, 0, 1, 2))) == [0]
    assert step(state, plan(2, decode(1, 5))) == [3]
    assert step(state, plan(3, decode(1, 6))) == [4]


def test_inputs_from_the_cache_count_as_if_they_had_been_computed() -> None:
    state = SamplingState()
    fill = SlotFill(3, 1, presence(3), cached_tokens=4, cached_token_ids=(0, 1, 0, 1))
    assert step(state, plan(0, chunk(1, 4, 2), fills=(fill,))) == [0], "0 was in the prompt only"
    assert step(state, plan(1, decode(1, 5))) == [3], "1 and 2 came behind the border"


def test_a_new_holder_starts_without_history_and_a_dead_row_leaves_none() -> None:
    state = SamplingState()
    assert step(state, plan(0, chunk(1, 0, 9), fills=(SlotFill(3, 1, presence(1)),))) == [0]
    assert step(state, plan(1, decode(1, 1))) == [1]
    assert step(state, plan(2, chunk(2, 0, 9), fills=(SlotFill(3, 2, presence(1)),))) == [0]
    assert step(state, plan(3, decode(1, 2))) == [0], "a row of the former holder has no history any more"
    assert step(state, plan(4, decode(2, 1))) == [1]


def test_more_distinct_tokens_than_the_first_capacity() -> None:
    state = SamplingState()
    vocab_size = 300
    logits = torch.arange(vocab_size, 0, -1, dtype=torch.float32)[None]
    first = plan(0, chunk(1, 0, 9), fills=(SlotFill(3, 1, RequestSampling(0.0, 1.0, 0, 0, 0, presence_penalty=1e3)),))
    state.accept(first)
    tokens = [state.sample(plan(seq, decode(1, seq)), logits.clone())[0].rows()[0].token for seq in range(1, 201)]
    assert tokens == [token for token in range(vocab_size) if token != 9][:200]


def test_plain_rows_say_the_same_beside_a_row_that_asks_for_more() -> None:
    """A step whose rows are all plain is drawn by a shorter way: same tokens and feedback."""
    plain = [RequestSampling(0.0), RequestSampling(0.8, seed=7), RequestSampling(1.2, top_k=5, top_p=0.9, seed=8)]
    asking = RequestSampling(0.0, num_top_logprobs=2)
    logits = torch.randn(len(plain) + 1, 300, generator=torch.Generator().manual_seed(1))
    drawn: dict[int, list[tuple[object, ...]]] = {}
    for count in (len(plain), len(plain) + 1):
        state = SamplingState()
        requests = [*plain, asking][:count]
        fills = tuple(SlotFill(slot, 1, sampling) for slot, sampling in enumerate(requests))
        prompts = (PlanRow(slot, 1, 0, 2, (4, 5), True) for slot in range(count))
        state.accept(first := plan(0, *prompts, fills=fills))
        pending, feedback = state.sample(first, logits[:count].clone())
        sampled = pending.rows()
        assert [row.logprobs is not None for row in sampled] == [each is asking for each in requests]
        drawn[count] = [
            (row.slot, row.token, *numbers) for row, numbers in zip(sampled, feedback.tolist(), strict=True)
        ]
    assert drawn[len(plain)] == drawn[len(plain) + 1][: len(plain)]
