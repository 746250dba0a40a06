"""A verifying row says what decode rows one by one say from the same logits, whatever the drafts and parameters are."""

from random import Random

import pytest
import torch

from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SampledRow, SlotFill, StepPlan
from stageline_runtime.stage.step.sampling_state import SamplingState

VOCAB_SIZE = 12
PROMPT = (1, 2, 3)
NUM_DRAFTS = 6
PARAMETERS = {
    "greedy": RequestSampling(temperature=0.0),
    "free": RequestSampling(temperature=1.0, seed=3),
    "top-p": RequestSampling(temperature=0.8, top_p=0.5, seed=4),
    "top-k": RequestSampling(temperature=1.4, top_k=3, seed=5, choice=1),
    "min-p": RequestSampling(temperature=1.0, min_p=0.3, seed=6),
    "bias": RequestSampling(temperature=0.0, logit_bias=((4, 3.0), (5, -100.0))),
    "logprobs": RequestSampling(temperature=0.7, seed=7, num_top_logprobs=2),
    "penalties": RequestSampling(
        temperature=0.9, seed=8, frequency_penalty=1.2, presence_penalty=0.3, repetition_penalty=1.4,
        num_prompt_tokens=len(PROMPT),
    ),
    "penalties-and-logprobs": RequestSampling(
        temperature=0.0, presence_penalty=2.0, num_top_logprobs=1, num_prompt_tokens=len(PROMPT)
    ),
    "least-length": RequestSampling(
        temperature=1.0, seed=9, min_tokens=4, end_token_ids=(0, 1, 2, 3, 4), num_prompt_tokens=len(PROMPT)
    ),
    "some-tokens": RequestSampling(temperature=1.0, seed=10, allowed_token_ids=(1, 4, 5, 11), bad_words=((4,),)),
    "banned-words": RequestSampling(
        temperature=1.0, seed=11, bad_words=(*((first, 5) for first in range(12)), (6, 7, 8)),
        num_prompt_tokens=len(PROMPT),
    ),
}  # fmt: skip


def logits_of(seed: int) -> torch.Tensor:
    """Of the token after the prompt, and of the tokens after it."""
    return torch.randn(NUM_DRAFTS + 2, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def plan(seq: int, row: PlanRow, *fills: SlotFill) -> StepPlan:
    return StepPlan(seq, 0, fills, (row,), row.num_tokens, -1, feedback_posted=True, dummy=False)


def run(state: SamplingState, of: StepPlan, logits: torch.Tensor) -> SampledRow:
    state.accept(of)
    drawn, feedback = state.sample(of, logits.clone())
    (sampled,) = drawn.rows()
    assert feedback.tolist() == [[sampled.token]]
    return sampled


def begun(sampling: RequestSampling, logits: torch.Tensor) -> tuple[SamplingState, SampledRow]:
    state = SamplingState()
    first = plan(0, PlanRow(0, 1, 0, len(PROMPT), PROMPT, need_sample=True), SlotFill(0, 1, sampling))
    return state, run(state, first, logits[:1])


def one_by_one(sampling: RequestSampling, logits: torch.Tensor) -> list[SampledRow]:
    state, first = begun(sampling, logits)
    rows = [first]
    for place in range(NUM_DRAFTS + 1):
        row = PlanRow(0, 1, len(PROMPT) + place, 1, (), need_sample=True)
        rows.append(run(state, plan(place + 1, row), logits[place + 1 : place + 2]))
    return rows


def verifying(position: int, *token_ids: int) -> PlanRow:
    return PlanRow(0, 1, position, len(token_ids), token_ids, need_sample=True, num_drafts=len(token_ids) - 1)


@pytest.mark.parametrize("sampling", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_what_holds_and_what_comes_after_is_what_decode_rows_say(sampling: RequestSampling) -> None:
    for seed in range(12):
        logits, random = logits_of(seed), Random(seed)
        expected = one_by_one(sampling, logits)
        tokens = [row.token for row in expected]
        for held in range(NUM_DRAFTS + 1):
            drafts = tokens[1 : NUM_DRAFTS + 1]
            if held < NUM_DRAFTS:
                drafts[held] = (drafts[held] + random.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE
            state, first = begun(sampling, logits)
            row = run(state, plan(1, verifying(len(PROMPT), first.token, *drafts)), logits[1:])
            assert row.num_sampled == held + 1, (seed, held)
            assert row.token == tokens[held + 1]
            assert row.logprobs == expected[held + 1].logprobs
            assert row.draft_logprobs == tuple(each.logprobs for each in expected[1 : held + 1] if each.logprobs)
            # The history is that of the tokens kept: the next decode row says what it would have said.
            if held < NUM_DRAFTS:
                decode = PlanRow(0, 1, len(PROMPT) + held + 1, 1, (), need_sample=True)
                assert run(state, plan(2, decode), logits[held + 2 : held + 3]).token == tokens[held + 2]


def test_a_verifying_row_of_a_slot_that_passed_on_leaves_its_holder_as_it_is() -> None:
    """Its request was preempted while the row was in flight."""
    logits = logits_of(1)
    expected = one_by_one(PARAMETERS["penalties"], logits)
    state, first = begun(PARAMETERS["penalties"], logits)
    for seq, generation in enumerate((2, 1), 1):
        prompt = PlanRow(0, generation, 0, len(PROMPT), PROMPT, need_sample=True)
        stale = PlanRow(0, 3 - generation, len(PROMPT), 2, (first.token, 4), need_sample=True, num_drafts=1)
        state.accept(plan(seq, prompt, SlotFill(0, generation, PARAMETERS["penalties"])))
        assert state.sample(plan(seq, prompt), logits[:1].clone())[0].rows()[0].token == first.token
        state.accept(plan(seq, stale))
        drawn, _ = state.sample(plan(seq, stale), logits[1:3].clone())
        (row,) = drawn.rows()
        assert (row.generation, row.failure) == (3 - generation, None)
    after = run(state, plan(3, verifying(len(PROMPT), first.token, expected[1].token)), logits[1:3])
    assert (after.num_sampled, after.token) == (2, expected[2].token)


def test_rows_with_and_without_drafts_share_a_plan() -> None:
    """Each keeps to its own logits: a verifying row between two others, one of which runs dead."""
    logits = logits_of(3)
    expected = one_by_one(PARAMETERS["free"], logits)
    state, first = begun(PARAMETERS["free"], logits)
    rows = (
        verifying(len(PROMPT), first.token, expected[1].token, expected[2].token),
        PlanRow(1, 1, 0, 2, (5, 6), need_sample=True),
        PlanRow(2, 9, 4, 1, (), need_sample=True),
    )
    both = StepPlan(1, 0, (SlotFill(1, 1, RequestSampling(temperature=0.0)),), rows, 6, -1, True, dummy=False)
    state.accept(both)
    other = torch.zeros(2, VOCAB_SIZE)
    other[0, 7] = other[1, 8] = 1.0
    drawn, feedback = state.sample(both, torch.cat((logits[1:4], other)))
    assert [(row.slot, row.token, row.num_sampled) for row in drawn.rows()] == [
        (0, expected[3].token, 3),
        (1, 7, 1),
        (2, 8, 1),
    ]
    assert feedback.tolist() == [[expected[3].token], [7], [8]]
