"""The runtime with one rule of verifying rows broken; as `broken_rules`."""

from collections.abc import Callable

import msgspec
import pytest
from torch import Tensor

from stageline_runtime.engine.scheduling.request import Guess, Request
from stageline_runtime.engine.scheduling.row_selection import select_chained
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, StepPlan
from stageline_runtime.stage.step import sampling_state
from stageline_runtime.stage.step.runner import SlotTokens, StageRunner
from stageline_runtime.stage.step.sampling_state import Draws, SamplingState, SlotSampling

Patch = pytest.MonkeyPatch


def take_a_wrong_guess_for_the_newest_token(patch: Patch) -> None:
    def live(self: SamplingState, row: PlanRow) -> SlotSampling | None:
        slot = self._by_slot.get(row.slot)
        return slot if slot is not None and slot.generation == row.generation else None

    patch.setattr(SamplingState, "live", live)


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
    def draw(self: SlotSampling, row: PlanRow, logits: Tensor, draws: Draws) -> list[int]:
        history, self.seen = self.seen, None
        try:
            return _draw_without_history(self, row, logits, draws)
        finally:
            self.seen = history

    _draw_without_history = SlotSampling.draw_in_turn
    patch.setattr(SlotSampling, "draw_in_turn", draw)


def feed_back_a_guess_that_ran_dead(patch: Patch) -> None:
    def apply(self: SlotTokens, feedback_through: int, take: Callable[[int], Tensor]) -> None:
        for plan in self.take_due(feedback_through):
            for planned, (generation, _count, _rejected, token) in zip(
                plan.sampled_rows, take(plan.seq).tolist(), strict=True
            ):
                if self.is_current(planned.slot, generation):
                    self._token[planned.slot] = token

    patch.setattr(SlotTokens, "apply_through", apply)


def believe_a_broken_chain(patch: Patch) -> None:
    def keep(self: Request) -> list[Guess]:  # noqa: ARG001
        return []

    patch.setattr(Request, "break_chain", keep)


def cancel_what_holds(patch: Patch) -> None:
    take = Scheduler.take_cancelled

    def take_more(self: Scheduler) -> list[int]:
        first = [r.guesses[0].seq for r in self._slots.running.values() if r.guesses and r.guesses[0].is_chained]
        return sorted({*take(self), *first})

    patch.setattr(Scheduler, "take_cancelled", take_more)


def say_that_every_draft_holds(patch: Patch) -> None:
    sample = SamplingState.sample

    def all_hold(self: SamplingState, plan: StepPlan, logits: Tensor) -> tuple[tuple[SampledRow, ...], Tensor]:
        sampled, feedback = sample(self, plan, logits)
        more = tuple(
            msgspec.structs.replace(row, num_sampled=row.num_sampled + row.num_rejected, num_rejected=0)
            for row in sampled
        )
        return more, feedback

    patch.setattr(SamplingState, "sample", all_hold)


def ask_only_for_the_newest_tokens_place(patch: Patch) -> None:
    """A chain whose guessed token is wrong at the right place is then believed."""

    def live(self: SamplingState, row: PlanRow) -> SlotSampling | None:
        slot = self._by_slot.get(row.slot)
        if slot is None or slot.generation != row.generation:
            return None
        return None if row.num_drafts and slot.newest[0] != row.position else slot

    patch.setattr(SamplingState, "live", live)


def send_nothing_of_a_cancelled_plan(patch: Patch) -> None:
    send = StageRunner._send
    run = StageRunner.run
    cancelled_plans: set[int] = set()

    def run_and_note(self: StageRunner, plan: StepPlan, *, cancelled: bool = False) -> object:
        if cancelled:
            cancelled_plans.add(plan.seq)
        try:
            return run(self, plan, cancelled=cancelled)
        finally:
            cancelled_plans.discard(plan.seq)

    def send_what_was_computed(self: StageRunner, plan: StepPlan, hidden: Tensor) -> None:
        if plan.seq not in cancelled_plans:
            send(self, plan, hidden)

    patch.setattr(StageRunner, "run", run_and_note)
    patch.setattr(StageRunner, "_send", send_what_was_computed)


def feed_nothing_back_of_a_cancelled_plan(patch: Patch) -> None:
    patch.setattr(StageRunner, "_leave_out", lambda self, plan: self._sampling.leave_out(plan)[0])


def decode_beside_a_guess(patch: Patch) -> None:
    def can_decode(self: Request) -> bool:
        ahead = self.samples_in_flight < (1 if self.out_of_turn else 2)
        return self.prefill_pending == 0 and self.samples_issued < self.max_new_tokens and ahead

    patch.setattr(Request, "can_decode", property(can_decode))


def chain_beyond_the_stages(patch: Patch) -> None:
    """Plans that nobody has to wait for are sent whatever is in flight."""

    def chain(self: Scheduler) -> StepPlan | None:
        rows = select_chained(self._slots, self._next_seq, self.max_step_tokens)
        return self._plan_of(rows.requests[0].cohort, rows) if rows.rows else None

    patch.setattr(Scheduler, "_chain", chain)


def chain_before_the_first_stage_has_begun(patch: Patch) -> None:
    """All rows of a chain are sent at once, and lie before the first stage where a newcomer has to wait for them."""
    patch.setattr(Scheduler, "_begun_through", property(lambda _self: 1 << 60, lambda _self, _seq: None), raising=False)


def keep_guesses_through_a_preemption(patch: Patch) -> None:
    restart = Request.restart

    def keep(self: Request) -> None:
        guesses = list(self.guesses)
        restart(self)
        self.guesses.extend(guesses)

    patch.setattr(Request, "restart", keep)
    patch.setattr(Request, "leave_chain", lambda _self: [])


def cancel_the_guess_that_is_known(patch: Patch) -> None:
    """What its first token writes may be indexed already, and is then found by who goes on from there."""

    def all_of_them(self: Request) -> list[Guess]:
        needless = list(self.guesses)
        self.guesses.clear()
        return needless

    patch.setattr(Request, "leave_chain", all_of_them)


def decode_without_the_verified_rows_feedback(patch: Patch) -> None:
    """The next decode row takes what the first stage knew before the drafts."""
    take = Request.take

    def forget(self: Request, seq: int, row: SampledRow) -> tuple[int, ...]:
        before, verifies = self.last_sample_seq, bool(self.guesses)
        tokens = take(self, seq, row)
        if verifies:
            self.last_sample_seq = before - 1
        return tokens

    patch.setattr(Request, "take", forget)
    patch.setattr(Request, "known_seq", property(lambda _self: -1, lambda _self, _seq: None))


BROKEN_DRAFT_RULES = (
    take_a_wrong_guess_for_the_newest_token,
    keep_one_draw_too_many,
    count_drafts_as_inputs,
    draw_every_draft_by_one_noise,
    forget_history_between_drafts,
    feed_back_a_guess_that_ran_dead,
    believe_a_broken_chain,
    cancel_what_holds,
    say_that_every_draft_holds,
    ask_only_for_the_newest_tokens_place,
    send_nothing_of_a_cancelled_plan,
    feed_nothing_back_of_a_cancelled_plan,
    decode_beside_a_guess,
    chain_beyond_the_stages,
    chain_before_the_first_stage_has_begun,
    keep_guesses_through_a_preemption,
    decode_without_the_verified_rows_feedback,
)
