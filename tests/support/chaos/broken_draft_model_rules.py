"""The runtime with one rule of the draft model broken; as `broken_rules`. Answers stay right: what shows is that drafts
aren't what the model says of what was said, or that somebody waits for ever.
"""

from collections.abc import Callable, Sequence

import msgspec
import pytest
from torch import Tensor

from stageline_runtime.plan_bus.messages import Drafted, SampledRow, SlotBlocks, StepPlan
from stageline_runtime.speculation.draft_history import DraftHistory
from stageline_runtime.stage.step.drafter import Drafter, _Input
from stageline_runtime.stage.step.pending_drafts import DraftingRow, PendingDrafts

Patch = pytest.MonkeyPatch


def keep_keys_of_rejected_drafts(patch: Patch) -> None:
    def write(self: DraftHistory, slot: int, position: int, ids: Sequence[int]) -> None:
        self._slots[slot].ids[position : position + len(ids)] = ids

    patch.setattr(DraftHistory, "_write", write)


def keep_all_keys_of_a_block_used_again(patch: Patch) -> None:
    change = DraftHistory.change

    def keep(self: DraftHistory, changed: SlotBlocks) -> None:
        change(self, msgspec.structs.replace(changed, are_new=False))

    patch.setattr(DraftHistory, "change", keep)


def draft_by_another_noise(patch: Patch) -> None:
    draw = Drafter._draw

    def one_place_on(self: Drafter, rows: Sequence[DraftingRow], logits: Tensor) -> Tensor:
        for row in rows:
            row.next_position += 1
        drawn = draw(self, rows, logits)
        for row in rows:
            row.next_position -= 1
        return drawn

    patch.setattr(Drafter, "_draw", one_place_on)


def draw_before_it_has_caught_up(patch: Patch) -> None:
    missed = Drafter._missed

    def draw(self: Drafter, rows: Sequence[DraftingRow]) -> list[_Input]:
        return [_Input(each.row, each.position, each.ids) for each in missed(self, rows)]

    patch.setattr(Drafter, "_missed", draw)


def leave_out_what_was_sampled(patch: Patch) -> None:
    def take(self: Drafter, plan: StepPlan, sampled: Sequence[SampledRow]) -> None:
        tokens = self._history
        for planned, row in zip(plan.sampled_rows, sampled, strict=True):
            if tokens.is_current(row.slot, row.generation):
                tokens.take(row.slot, planned.position + planned.num_tokens - planned.num_drafts, (0,))

    patch.setattr(Drafter, "_take", take)


def say_nothing_of_a_request_that_has_left(patch: Patch) -> None:
    drafted = PendingDrafts.drafted

    def only_some(self: PendingDrafts) -> Drafted:
        said = drafted(self)
        return Drafted(said.seq, tuple(row for row in said.rows if row.token_ids), said.step_seconds)

    patch.setattr(PendingDrafts, "drafted", only_some)


BROKEN_DRAFT_MODEL_RULES: tuple[Callable[[Patch], None], ...] = (
    keep_keys_of_rejected_drafts,
    keep_all_keys_of_a_block_used_again,
    draft_by_another_noise,
    draw_before_it_has_caught_up,
    leave_out_what_was_sampled,
    say_nothing_of_a_request_that_has_left,
)
