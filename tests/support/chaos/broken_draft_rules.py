"""The runtime with one rule of verifying rows broken; as `broken_rules`."""

import msgspec
import pytest
from torch import Tensor

from stageline_runtime.engine.scheduling import row_selection
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.row_selection import SelectedRows
from stageline_runtime.engine.scheduling.slot_assignment import SlotAssignment
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, StepPlan
from stageline_runtime.sampling.adjustments import Placing
from stageline_runtime.stage.step import sampling_state
from stageline_runtime.stage.step.pending_rows import PendingRows
from stageline_runtime.stage.step.sampling_state import SamplingState, SlotSampling

Patch = pytest.MonkeyPatch


def keep_one_draw_too_many(patch: Patch) -> None:
    kept = sampling_state._kept

    def keep_more(row: PlanRow, slot: SlotSampling | None, tokens: list[int]) -> list[int]:
        return tokens[: len(kept(row, slot, tokens)) + 1]

    patch.setattr(sampling_state, "_kept", keep_more)


def count_drafts_as_inputs(patch: Patch) -> None:
    patch.setattr(PlanRow, "is_chunk", property(lambda row: bool(row.token_ids)))


def draw_every_draft_by_one_noise(patch: Patch) -> None:
    draws_of = sampling_state.draws_of

    def at_one_position(slots: list[SlotSampling | None], rows: tuple[PlanRow, ...]) -> object:
        sampling, positions = draws_of(slots, rows)
        firsts = [row.position + row.num_tokens - row.num_drafts for row in rows for _ in range(row.num_draws)]
        assert len(firsts) == len(positions)
        return sampling, firsts

    patch.setattr(sampling_state, "draws_of", at_one_position)


def forget_history_between_drafts(patch: Patch) -> None:
    def draw(self: SlotSampling, row: PlanRow, logits: Tensor, place: Placing) -> list[int]:
        history, self.seen = self.seen, None
        try:
            return _draw_without_history(self, row, logits, place)
        finally:
            self.seen = history

    _draw_without_history = SlotSampling.draw_in_turn
    patch.setattr(SlotSampling, "draw_in_turn", draw)


def say_that_every_draft_holds(patch: Patch) -> None:
    sample = SamplingState.sample

    def all_hold(self: SamplingState, plan: StepPlan, logits: Tensor) -> tuple[PendingRows, Tensor]:
        sampled, feedback = sample(self, plan, logits)
        more = tuple(
            msgspec.structs.replace(row, num_sampled=1 + planned.num_drafts)
            for planned, row in zip(plan.sampled_rows, sampled.rows(), strict=True)
        )
        return PendingRows.known(more), feedback

    patch.setattr(SamplingState, "sample", all_hold)


def decode_beside_a_verifying_row(patch: Patch) -> None:
    def can_decode(self: Request) -> bool:
        ahead = self.samples_in_flight < (1 if self.out_of_turn else 2)
        return self.prefill_pending == 0 and self.samples_issued < self.max_new_tokens and ahead

    patch.setattr(Request, "can_decode", property(can_decode))


def follow_a_verifying_row_without_its_feedback(patch: Patch) -> None:
    """The next decode row takes what the first stage knew before the drafts."""
    take = Request.take

    def forget(self: Request, row: SampledRow) -> tuple[int, ...]:
        if self.verifying is not None:
            self.last_sample_seq = -1
        return take(self, row)

    patch.setattr(Request, "take", forget)


def verify_before_the_newest_token_is_known(patch: Patch) -> None:
    """The row then begins with the token before the newest one."""

    def at_once(slots: SlotAssignment, request: Request, plan: SelectedRows, num_rows: int) -> bool:
        drafts = request.propose(num_rows, plan.budget - num_rows) if request.output else ()
        if not drafts or not slots.ledger.grow(request.slot, request.decode_position + 1 + len(drafts)):
            return False
        plan.add_verification(request, drafts)
        return True

    patch.setattr(row_selection, "_speculate", at_once)


BROKEN_DRAFT_RULES = (
    keep_one_draw_too_many,
    count_drafts_as_inputs,
    draw_every_draft_by_one_noise,
    forget_history_between_drafts,
    say_that_every_draft_holds,
    decode_beside_a_verifying_row,
    follow_a_verifying_row_without_its_feedback,
    verify_before_the_newest_token_is_known,
)
