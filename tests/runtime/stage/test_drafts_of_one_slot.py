"""The draft model's own end: what it drafts for one slot, beside a model whose vocabulary is larger or smaller."""

import pytest

from oracles.hash_draft_model import HashDraftModel
from oracles.hash_model import VOCAB_SIZE, reference_logits
from oracles.paged_store import own_blocks
from stageline_runtime.plan_bus.messages import DraftedRow, PlanRow, RequestSampling, SampledRow, SlotFill, StepPlan
from stageline_runtime.stage.step.drafter import Drafter, DraftStage
from stageline_runtime.stage.step.pending_rows import PendingRows

PROMPT = (3, 1, 4, 1, 5)
GREEDY = RequestSampling(temperature=0.0)


def best(context: tuple[int, ...], vocab_size: int = VOCAB_SIZE) -> int:
    logits = reference_logits(context, 1)[:vocab_size]
    return logits.index(max(logits))


def drafter(model: HashDraftModel, *, vocab_size: int = VOCAB_SIZE, context: int = 64, room: int = 16) -> Drafter:
    stage = DraftStage(model=model, vocab_size=VOCAB_SIZE, context_tokens=context)
    return Drafter(stage, num_slots=2, max_step_tokens=room, vocab_size=vocab_size)


def plan(seq: int, row: PlanRow, draft_steps: int, *, fills: tuple[SlotFill, ...] = ()) -> StepPlan:
    return StepPlan(
        seq=seq,
        cohort=0,
        fills=fills,
        rows=(row,),
        padded_tokens=8,
        feedback_through=-1,
        feedback_posted=False,
        dummy=False,
        draft_steps=draft_steps,
        tables=own_blocks(2, 64) if seq == 0 else (),
    )


def drafted(drafting: Drafter, given: StepPlan, *sampled: SampledRow) -> DraftedRow:
    drafting.accept(given)
    drafting.take(given, PendingRows.known(sampled))
    (row,) = drafting.draft(given, lambda _row: None).drafted().rows
    return row


FIRST = PlanRow(0, 1, 0, len(PROMPT), PROMPT, need_sample=True, wants_drafts=True)
FILL = SlotFill(0, 1, GREEDY)


def follow(context: tuple[int, ...], count: int, vocab_size: int = VOCAB_SIZE) -> tuple[int, ...]:
    for _ in range(count):
        context = (*context, best(context, vocab_size))
    return context[-count:]


def test_it_drafts_from_what_was_sampled_and_computes_each_token_once() -> None:
    model = HashDraftModel(1)
    drafting = drafter(model)
    row = drafted(drafting, plan(0, FIRST, 3, fills=(FILL,)), SampledRow(0, 1, 9))
    expected = follow((*PROMPT, 9), 3)
    assert row == DraftedRow(0, 1, 6, expected)
    assert model.tokens_computed == 6 + 2
    # All hold; the next round computes the last draft and the token after it.
    ids = (9, *expected)
    verifying = PlanRow(0, 1, 5, 4, ids, need_sample=True, num_drafts=3, wants_drafts=True)
    row = drafted(drafting, plan(1, verifying, 1), SampledRow(0, 1, 7, num_sampled=4))
    assert row == DraftedRow(0, 1, 10, follow((*PROMPT, *ids, 7), 1))
    assert model.tokens_computed == 8 + 2


def test_a_long_prompt_is_caught_up_with_in_pieces() -> None:
    drafting = drafter(HashDraftModel(1), room=4)
    assert drafted(drafting, plan(0, FIRST, 2, fills=(FILL,)), SampledRow(0, 1, 9)).token_ids == ()
    decode = PlanRow(0, 1, 5, 1, (), need_sample=True, wants_drafts=True)
    row = drafted(drafting, plan(1, decode, 2), SampledRow(0, 1, 8))
    assert row == DraftedRow(0, 1, 7, follow((*PROMPT, 9, 8), 2))


def test_it_stops_at_the_end_of_its_context() -> None:
    assert len(drafted(drafter(HashDraftModel(1), context=7), plan(0, FIRST, 5, fills=(FILL,)), SampledRow(0, 1, 9))
               .token_ids) == 2  # fmt: skip
    short = drafter(HashDraftModel(1), context=5)
    assert drafted(short, plan(0, FIRST, 5, fills=(FILL,)), SampledRow(0, 1, 9)).token_ids == ()


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 20, VOCAB_SIZE + 9], ids=["smaller", "larger"])
def test_ids_that_only_one_vocabulary_has_are_never_drafted(vocab_size: int) -> None:
    drafting = drafter(HashDraftModel(1), vocab_size=vocab_size)
    row = drafted(drafting, plan(0, FIRST, 4, fills=(FILL,)), SampledRow(0, 1, 9))
    assert row.token_ids == follow((*PROMPT, 9), 4, min(vocab_size, VOCAB_SIZE))
    # An id that only the model has comes in its prompt.
    strange = PlanRow(0, 2, 0, 1, (VOCAB_SIZE + 3,), need_sample=True, wants_drafts=True)
    again = plan(1, strange, 1, fills=(SlotFill(0, 2, GREEDY),))
    assert len(drafted(drafting, again, SampledRow(0, 2, 2)).token_ids) == 1


def test_a_row_whose_slot_another_request_has_taken_gets_nothing() -> None:
    drafting = drafter(HashDraftModel(1))
    drafting.accept(plan(0, FIRST, 0, fills=(SlotFill(0, 2, GREEDY),)))
    assert drafted(drafting, plan(1, FIRST, 2), SampledRow(0, 1, 9)) == DraftedRow(0, 1, 0, ())
