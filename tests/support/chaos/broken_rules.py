"""The runtime with one rule broken, so that a search for wrong orders can be shown to find what it looks for.

Each function breaks one rule through `patch`; `BROKEN_RULES` names the rules with what a search has to say of each.
"""

from collections.abc import Callable, Iterable

import msgspec
import pytest
from torch import Tensor

from chaos.local_engine import LocalEngine
from oracles.hash_model import HashModel
from oracles.paged_store import PagedStore
from stageline_runtime.engine.scheduling.scheduler import NewToken, Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import Place, PlanRow, SampledRow, SlotBlocks, StepPlan
from stageline_runtime.sampling.adjustments import SeenTokens
from stageline_runtime.stage.step.pending_rows import PendingRows
from stageline_runtime.stage.step.runner import StageRunner
from stageline_runtime.stage.step.sampling_state import SamplingState, sampled_token_indices
from stageline_runtime.stage.step.slot_tokens import SlotTokens
from stageline_runtime.transport.socket_transport import SocketTransport

Patch = pytest.MonkeyPatch
Take = Callable[[int], Tensor]


def apply_stale_feedback(patch: Patch) -> None:
    def apply(self: SlotTokens, feedback_through: int, take: Take) -> None:
        while self.due(feedback_through):
            plan = self._expected.popleft()
            for planned, token in zip(plan.sampled_rows, take(plan.seq)[:, 0], strict=True):
                self._token[planned.slot] = token

    patch.setattr(SlotTokens, "apply_through", apply)


def apply_feedback_one_plan_late(patch: Patch) -> None:
    apply = SlotTokens.apply_through
    patch.setattr(SlotTokens, "apply_through", lambda self, through, take: apply(self, through - 1, take))


def apply_feedback_one_plan_early(patch: Patch) -> None:
    apply = SlotTokens.apply_through
    patch.setattr(SlotTokens, "apply_through", lambda self, through, take: apply(self, through + 1, take))


def change_plans(patch: Patch, change: Callable[[StepPlan], StepPlan]) -> None:
    """Send other plans than the scheduler made."""
    schedule = Scheduler.schedule

    def changed(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        return plan and change(plan)

    patch.setattr(Scheduler, "schedule", changed)


def name_too_little_feedback(patch: Patch) -> None:
    change_plans(patch, lambda plan: msgspec.structs.replace(plan, feedback_through=plan.feedback_through - 1))


def decode_too_far_ahead(patch: Patch) -> None:
    patch.setattr("stageline_runtime.engine.scheduling.request.MAX_DECODES_AHEAD", 3)


def give_slots_out_under_one_generation(patch: Patch) -> None:
    take = SlotLedger.take
    patch.setattr(SlotLedger, "take", lambda *given, **named: (take(*given, **named)[0], 1, 0))


def sample_rows_in_another_order(patch: Patch) -> None:
    def reversed_indices(plan: StepPlan) -> list[int]:
        return sampled_token_indices(plan)[::-1]

    patch.setattr("stageline_runtime.stage.step.runner.sampled_token_indices", reversed_indices)


def send_feedback_rows_in_another_order(patch: Patch) -> None:
    sample = SamplingState.sample

    def flipped(self: SamplingState, plan: StepPlan, logits: Tensor) -> tuple[PendingRows, Tensor]:
        sampled, feedback = sample(self, plan, logits)
        return sampled, feedback.flip(0)

    patch.setattr(SamplingState, "sample", flipped)


def run_rows_in_another_order(patch: Patch) -> None:
    run = HashModel._run_row

    def swapped(self: HashModel, row: PlanRow, values: list[int]) -> list[int]:
        return run(self, row, values)[::-1] if self._stage else run(self, row, values)

    patch.setattr(HashModel, "_run_row", swapped)


def use_a_ring_slot_before_its_send_is_complete(patch: Patch) -> None:
    send = SocketTransport.send_hidden
    rings: dict[int, dict[tuple[int, ...], list[Tensor]]] = {}

    def send_from_ring(self: SocketTransport, seq: int, hidden: Tensor) -> None:
        ring = rings.setdefault(id(self), {}).setdefault(tuple(hidden.shape), [])
        ring.append(hidden.clone() if len(ring) < 2 else ring.pop(0).copy_(hidden))
        send(self, seq, ring[-1])

    patch.setattr(SocketTransport, "send_hidden", send_from_ring)


def post_feedback_that_no_plan_names(patch: Patch) -> None:
    def accept(self: StageRunner, plan: StepPlan) -> None:
        if not self.is_first:
            self._transport.post_hidden(plan.seq, plan.padded_tokens)
        elif plan.sampled_rows:
            self._tokens.expect(plan)
            self._transport.post_feedback(plan.seq, len(plan.sampled_rows))

    patch.setattr(StageRunner, "accept", accept)


def expect_a_tensor_without_its_padding(patch: Patch) -> None:
    post = SocketTransport.post_hidden
    patch.setattr(SocketTransport, "post_hidden", lambda self, seq, tokens: post(self, seq, max(1, tokens - 1)))


def lose_one_feedback(patch: Patch) -> None:
    send = SocketTransport.send_feedback

    def send_most(self: SocketTransport, seq: int, rows: Tensor) -> None:
        if seq != 2:
            send(self, seq, rows)

    patch.setattr(SocketTransport, "send_feedback", send_most)


def lose_tokens_on_the_way_to_the_engine(patch: Patch) -> None:
    complete = Scheduler.complete

    def complete_less(self: Scheduler, seq: int, rows: Iterable[SampledRow]) -> list[NewToken]:
        return complete(self, seq, list(rows)[: -1 if seq % 5 == 2 else None])

    patch.setattr(Scheduler, "complete", complete_less)


def take_tokens_twice(patch: Patch) -> None:
    complete = Scheduler.complete

    def complete_twice(self: Scheduler, seq: int, rows: Iterable[SampledRow]) -> list[NewToken]:
        taken = list(rows)
        return complete(self, seq, [*taken, *taken[:1]])

    patch.setattr(Scheduler, "complete", complete_twice)


def go_on_after_an_abort(patch: Patch) -> None:
    def ignore(self: Scheduler, request_id: str) -> bool:
        waiting = self._slots.waiting._requests
        return request_id in self._slots.running or any(request.request_id == request_id for request in waiting)

    patch.setattr(Scheduler, "abort", ignore)


def give_a_late_token_to_the_next_holder(patch: Patch) -> None:
    complete = Scheduler.complete

    def complete_by_slot(self: Scheduler, seq: int, rows: Iterable[SampledRow]) -> list[NewToken]:
        newest = dict(sorted(self._slots._by_row))
        renamed = [msgspec.structs.replace(row, generation=newest.get(row.slot, 0)) for row in rows]
        return complete(self, seq, renamed)

    patch.setattr(Scheduler, "complete", complete_by_slot)


def run_plans_as_they_come(patch: Patch) -> None:
    """The bus lets a plan overtake the one before it."""

    def deliver_newest(self: LocalEngine, place: Place) -> None:
        self.mailboxes[place].append(self._on_the_bus[place].pop())

    patch.setattr(LocalEngine, "_deliver_to", deliver_newest)


def keep_what_a_slot_held(patch: Patch) -> None:
    """A stage goes on reading the blocks of the slot's former holder."""
    change = PagedStore.change

    def first_alone(self: PagedStore, changes: Iterable[SlotBlocks]) -> None:
        change(self, [each for each in changes if each.start or not self.tables.get(each.slot)])

    patch.setattr(PagedStore, "change", first_alone)


def forget_what_was_said(patch: Patch) -> None:
    patch.setattr(SeenTokens, "add_output", lambda _self, _tokens: None)


def sample_a_slot_by_its_former_holder(patch: Patch) -> None:
    """The last stage keeps the sampling parameters of the first request in each slot."""
    accept = SamplingState.accept

    def accept_first(self: SamplingState, plan: StepPlan) -> None:
        fills = tuple(fill for fill in plan.fills if fill.generation == 1)
        accept(self, msgspec.structs.replace(plan, fills=fills))

    patch.setattr(SamplingState, "accept", accept_first)


BROKEN_RULES: list[Callable[[Patch], None]] = [
    apply_stale_feedback,
    apply_feedback_one_plan_late,
    apply_feedback_one_plan_early,
    name_too_little_feedback,
    decode_too_far_ahead,
    give_slots_out_under_one_generation,
    sample_rows_in_another_order,
    send_feedback_rows_in_another_order,
    run_rows_in_another_order,
    use_a_ring_slot_before_its_send_is_complete,
    post_feedback_that_no_plan_names,
    expect_a_tensor_without_its_padding,
    lose_one_feedback,
    lose_tokens_on_the_way_to_the_engine,
    take_tokens_twice,
    go_on_after_an_abort,
    give_a_late_token_to_the_next_holder,
    run_plans_as_they_come,
    keep_what_a_slot_held,
    forget_what_was_said,
    sample_a_slot_by_its_former_holder,
]
