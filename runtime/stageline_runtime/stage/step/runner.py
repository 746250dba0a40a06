"""One stage's step: take a plan, get inputs, run the layers, hand on. The same code for every role and transport.

Plans run in `seq` order. Everything sent, received or sampled follows from the plan alone; the clock is told at each
change of state and the watchdog of each operation that could hang.

The first stage remembers the newest token of each slot. Sampled tokens come back to it as feedback, which is applied in
plan order just before inputs are built. Invariant: a row of a stale generation is never applied, however late it comes;
every posted feedback is taken exactly once.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from stageline_api.telemetry.timeline import (
    DRAFT,
    FORWARD,
    PROMPT_LOGPROBS,
    RECEIVE_FEEDBACK,
    RECEIVE_HIDDEN,
    SEND_FEEDBACK,
    SEND_HIDDEN,
)
from stageline_runtime.accelerator.protocol import Accelerator, Event
from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.models.protocol import CPU, CutsHead, StageModel
from stageline_runtime.plan_bus.messages import BusProtocolError, PromptReport, SlotFill, StepPlan
from stageline_runtime.ranks.protocol import LoneRank, RankGroup
from stageline_runtime.stage.step.deferred_sampling import DeferredSampling, is_waited_for
from stageline_runtime.stage.step.drafter import Drafter
from stageline_runtime.stage.step.in_flight import Sampled
from stageline_runtime.stage.step.pending_drafts import PendingDrafts
from stageline_runtime.stage.step.prompt_reports import PromptReports
from stageline_runtime.stage.step.rank_sampling import OtherRankSampling, PartDraws, share_sampled
from stageline_runtime.stage.step.sampling_state import SamplingState, sampled_token_indices
from stageline_runtime.stage.telemetry.state_clock import BusyKind, State, WaitReason
from stageline_runtime.transport.protocol import NEWEST_COLUMN as NEWEST
from stageline_runtime.transport.protocol import Transport


class ExpectedFeedback:
    """Which request holds each slot, and which plans' feedback is still to come; knows no token."""

    def __init__(self, num_slots: int) -> None:
        self._generation = [0] * num_slots
        self._expected: deque[StepPlan] = deque()

    def fill(self, fill: SlotFill) -> None:
        """A request takes a slot; what its former holder still has coming is stale from now on."""
        self._generation[fill.slot] = fill.generation

    def expect(self, plan: StepPlan) -> None:
        """Plan `plan` will be followed by feedback; called in plan order."""
        if plan.feedback_posted:
            self._expected.append(plan)

    def due(self, feedback_through: int) -> bool:
        """Whether feedback up to `feedback_through` is still to be applied."""
        return bool(self._expected) and self._expected[0].seq <= feedback_through

    def take_due(self, feedback_through: int) -> Iterator[StepPlan]:
        """The plans whose feedback is to be applied now, in order; each is given once."""
        while self.due(feedback_through):
            yield self._expected.popleft()

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether the slot is still held by the request that had this generation."""
        return self._generation[slot] == generation


class SlotTokens(ExpectedFeedback):
    """Newest token of every slot, in host memory."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._token = [0] * num_slots

    def apply_through(self, feedback_through: int, take: Callable[[int], Tensor]) -> None:
        """Apply all feedback up to plan `feedback_through`; `take(seq)` gives its rows `[num_rows, 2]`."""
        for plan in self.take_due(feedback_through):
            rows = take(plan.seq).tolist()
            for planned, (generation, token) in zip(plan.sampled_rows, rows, strict=True):
                if generation != planned.generation:
                    what = f"generation {generation} of slot {planned.slot}, not {planned.generation}"
                    raise BusProtocolError(f"the last stage's feedback of plan {plan.seq} is of {what}")
                if self.is_current(planned.slot, generation):
                    self._token[planned.slot] = token

    def inputs(self, plan: StepPlan) -> Tensor:
        """Token ids `[padded_tokens]` of a plan: prompt chunks from the plan, decode rows from feedback."""
        ids: list[int] = []
        for row in plan.rows:
            ids.extend(row.token_ids or (self._token[row.slot],))
        ids.extend([0] * (plan.padded_tokens - len(ids)))
        return torch.frombuffer(array("q", ids), dtype=torch.int64)


class DeviceSlotTokens(ExpectedFeedback):
    """Newest token of every slot, in device memory: the host never sees a value, so it never waits for one.

    Which rows of a feedback are stale follows from generations, which the host knows; such a row's token is written to
    one more place, which no slot reads.
    """

    def __init__(self, num_slots: int, accelerator: Accelerator) -> None:
        super().__init__(num_slots)
        self._accelerator = accelerator
        self._unread = num_slots
        self._token = torch.zeros(num_slots + 1, dtype=torch.int64, device=accelerator.device)

    def apply_through(self, feedback_through: int, take: Callable[[int], Tensor]) -> None:
        for plan in self.take_due(feedback_through):
            rows = take(plan.seq)
            places = [
                row.slot if self.is_current(row.slot, row.generation) else self._unread for row in plan.sampled_rows
            ]
            written = self._accelerator.place(torch.tensor(places, dtype=torch.int64))
            self._token[written] = rows[:, NEWEST]

    def inputs(self, plan: StepPlan) -> Tensor:
        """As `SlotTokens.inputs`; decode rows are given to the device as `-1 - slot`."""
        ids: list[int] = []
        for row in plan.rows:
            ids.extend(row.token_ids or (-1 - row.slot,))
        ids.extend([0] * (plan.padded_tokens - len(ids)))
        given = self._accelerator.place(torch.tensor(ids, dtype=torch.int64))
        return torch.where(given < 0, self._token[(-1 - given).clamp(min=0)], given)


class Marks(Protocol):
    """Is told of each change of state: the state clock, or what stands in for it before a device."""

    def enter(self, state: State, operation: str = "") -> None:
        """The stage enters `state` now."""


class Watch(Protocol):
    """Is told of each operation that could hang."""

    def watch(self, step: int, operation: str, peer: int | None) -> None:
        """An operation begins; it replaces the one before."""

    def rest(self) -> None:
        """No operation that could hang is under way."""


class StageRunner:
    """Runs plans for one stage; owns the stage's per-slot state."""

    def __init__(
        self,
        model: StageModel,
        transport: Transport,
        clock: Marks,
        watchdog: Watch,
        *,
        stage: int,
        stage_count: int,
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        guides: GuideMaker | None = None,
        accelerator: Accelerator | None = None,
        drafter: Drafter | None = None,
        ranks: RankGroup | None = None,
        report_rows: int = 8,
        vocab_size: int = 0,
    ) -> None:
        """`drafter`: on the last stage's first rank, where the group has a draft model. `ranks`: of this stage, which
        need the model's `vocab_size` where there are several. `report_rows`: over how many rows the head runs at once
        for log probabilities of prompts.
        """
        self._model = model
        self._drafter = drafter
        self._transport = transport
        self._clock = clock
        self._watchdog = watchdog
        self._stage = stage
        self._last = stage_count - 1
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._accelerator = accelerator
        self._device = CPU if accelerator is None else accelerator.device
        self._tokens = SlotTokens(num_slots) if accelerator is None else DeviceSlotTokens(num_slots, accelerator)
        self._arrived: Event | None = None
        """On a device: the hidden tensor of a plan that the host waits for is here."""
        self._guides = guides
        self._ranks = ranks if ranks is not None else LoneRank()
        self._sampling: SamplingState | OtherRankSampling
        if self._ranks.rank > 0:
            self._sampling = OtherRankSampling(self._device)
        else:
            self._sampling = SamplingState(guides) if accelerator is None else DeferredSampling(accelerator, guides)
        self._cut_head: CutsHead | None = None
        self._parts: PartDraws | None = None
        if self._ranks.size > 1 and self.is_last and accelerator is None:
            assert isinstance(model, CutsHead), "ranks share a head that can't be had in parts"
            assert vocab_size > 0, "the size of the vocabulary is not said"
            self._cut_head, self._parts = model, PartDraws(self._ranks, model.first_token, vocab_size)
        self._reports = PromptReports(model, report_rows, accelerator)

    @property
    def is_first(self) -> bool:
        return self._stage == 0

    @property
    def is_last(self) -> bool:
        return self._stage == self._last

    @property
    def tells(self) -> bool:
        """Whether the engine hears from here what a plan sampled: the last stage's first rank."""
        return self.is_last and self._ranks.rank == 0

    def accept(self, plan: StepPlan) -> None:
        """A plan has come off the bus: post what it will receive, ahead of running it."""
        if not self.is_first:
            self._transport.post_hidden(plan.seq, plan.padded_tokens)
        elif plan.feedback_posted:
            self._tokens.expect(plan)
            self._transport.post_feedback(plan.seq, len(plan.sampled_rows))

    def prepare_guide(self, schema: str, when_ready: Callable[[], None]) -> None:
        """Compile a grammar beside the steps; `when_ready` is called in any thread. Nothing where none is used."""
        if self._guides is not None:
            self._guides.prepare(schema, when_ready)

    def run(self, plan: StepPlan) -> Sampled:
        """Run one plan; returns the sampled rows (the last stage's; empty elsewhere). On a device: queue it.

        Whoever calls it is in torch's inference mode.

        Raises:
            PeerLostError: a neighbour is gone or did not answer in time.
        """
        self._fill(plan)
        batch = None if plan.is_heartbeat else self._model.step_batch(plan)
        hidden = self._first_input(plan) if self.is_first else self._receive(plan)
        if batch is not None:
            self._busy(plan)
            if self.is_first:
                hidden = self._model.embed(hidden)
            hidden = self._model.layers(hidden, batch)
        sampled: Sampled = ()
        if not self.is_last:
            self._send(plan, hidden)
        elif plan.sampled_rows:
            sampled = self._sample(plan, hidden)
        if self.is_last and plan.reports_prompts:
            # After the feedback, which other stages wait for.
            self._busy(plan, PROMPT_LOGPROBS)
            self._reports.run(plan, hidden, tells=self.tells)
        self._enter(WaitReason.HOST, plan, "")
        return sampled

    def take_reports(self, plan: StepPlan) -> tuple[PromptReport, ...]:
        """What a plan that is done reports of prompts; once, and only where `tells`."""
        return self._reports.take(plan.seq)

    def _fill(self, plan: StepPlan) -> None:
        self._model.change_tables(plan.tables)
        for fill in plan.fills:
            self._tokens.fill(fill)
        if self.is_last:
            self._sampling.accept(plan)
            if self._parts is not None:
                self._parts.accept(plan)
        if self._drafter is not None:
            self._drafter.accept(plan)

    def _first_input(self, plan: StepPlan) -> Tensor:
        """Token ids `[padded_tokens]`; for a plan that is not computed the hidden tensor `[padded_tokens, hidden_size]`
        itself.
        """
        if plan.is_heartbeat:
            return torch.zeros(plan.padded_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        if self._tokens.due(plan.feedback_through):
            self._enter(WaitReason.FEEDBACK, plan, RECEIVE_FEEDBACK, self._last)
            self._tokens.apply_through(plan.feedback_through, self._transport.wait_feedback)
            self._enter(WaitReason.HOST, plan, "build inputs")
        return self._tokens.inputs(plan)

    def _receive(self, plan: StepPlan) -> Tensor:
        self._enter(WaitReason.RECV, plan, RECEIVE_HIDDEN, self._stage - 1)
        hidden = self._transport.wait_hidden(plan.seq)
        is_awaited = self.is_last and is_waited_for(plan)
        self._arrived = self._accelerator.main.record() if self._accelerator is not None and is_awaited else None
        return hidden

    def _send(self, plan: StepPlan, hidden: Tensor) -> None:
        reason = WaitReason.SEND if self._transport.would_block() else WaitReason.HOST
        self._enter(reason, plan, SEND_HIDDEN, self._stage + 1)
        self._transport.send_hidden(plan.seq, hidden)

    def _sample(self, plan: StepPlan, hidden: Tensor) -> Sampled:
        sampled = self._sample_from(plan, self._sampled_from(plan, hidden))
        if self._drafter is not None:
            self._drafter.take(plan, sampled)
        return sampled

    def _sample_from(self, plan: StepPlan, hidden_rows: Tensor) -> Sampled:
        rows = None if self._parts is None else self._parts.rows_of(plan)
        if self._parts is None or self._cut_head is None or rows is None:
            return self._sample_logits(plan, self._model.head(hidden_rows))
        part = self._cut_head.head_part(hidden_rows)
        tokens = self._parts.draw(plan, rows, part.float())
        if tokens is None:
            return self._sample_logits(plan, self._cut_head.whole_head(part))
        sampled, feedback = self._sampling.take_drawn(plan, tokens)
        self._send_known_feedback(plan, feedback)
        return sampled

    def _sample_logits(self, plan: StepPlan, logits: Tensor) -> Sampled:
        if self._arrived is not None:
            self._await_arrival(plan, self._arrived)
        sampled, feedback = self._sampling.sample(plan, logits)
        self._send_feedback(plan, feedback)
        return sampled

    def _await_arrival(self, plan: StepPlan, arrived: Event) -> None:
        """Where there are drafts the host waits for the device: first for what a peer sends it, and says so."""
        self._watchdog.watch(plan.seq, RECEIVE_HIDDEN, self._stage - 1)
        arrived.wait()
        self._watchdog.watch(plan.seq, FORWARD, None)

    def _sampled_from(self, plan: StepPlan, hidden: Tensor) -> Tensor:
        """The hidden states `[num_draws, hidden_size]` that the plan's sampled rows are drawn from."""
        indices = sampled_token_indices(plan)
        if indices == list(range(len(indices))):
            # Every step that only decodes: nothing to gather, and without padding nothing to cut off.
            return hidden if len(indices) == plan.padded_tokens else hidden[: len(indices)]
        chosen = torch.tensor(indices, dtype=torch.int64)
        return hidden[chosen if self._accelerator is None else self._accelerator.place(chosen)]

    def drafts_after(self, plan: StepPlan) -> bool:
        """Whether tokens are drafted here once the plan has been run."""
        return plan.draft_steps > 0 and self.tells

    def draft(self, plan: StepPlan) -> PendingDrafts | None:
        """Run the draft steps of a plan that has been run and told; on a device, queue them behind it, before another
        plan is run. None where it has none.
        """
        if not self.drafts_after(plan):
            return None
        if self._drafter is None:
            steps = f"{plan.draft_steps}, and this stage has no draft model"
            raise BusProtocolError(f"StepPlan.draft_steps of plan {plan.seq} is {steps}")
        self._clock.enter(BusyKind.DRAFT, DRAFT)
        self._watchdog.watch(plan.seq, DRAFT, None)
        assert isinstance(self._sampling, SamplingState), "drafts are the first rank's"
        drafts = self._drafter.draft(plan, self._sampling.live)
        self._enter(WaitReason.HOST, plan, "")
        return drafts

    def _send_feedback(self, plan: StepPlan, feedback: Tensor) -> None:
        self._send_known_feedback(plan, share_sampled(self._ranks, feedback))

    def _send_known_feedback(self, plan: StepPlan, feedback: Tensor) -> None:
        """What all ranks of this stage have alike."""
        if plan.feedback_posted:
            self._enter(WaitReason.HOST, plan, SEND_FEEDBACK, 0)
            self._transport.send_feedback(plan.seq, feedback)

    def _busy(self, plan: StepPlan, operation: str = FORWARD) -> None:
        self._clock.enter(step_kind(plan), operation)
        self._watchdog.watch(plan.seq, operation, None)

    def _enter(self, reason: WaitReason, plan: StepPlan, operation: str, peer: int | None = None) -> None:
        self._clock.enter(reason, operation)
        if operation:
            self._watchdog.watch(plan.seq, operation, peer)
        else:
            self._watchdog.rest()


def step_kind(plan: StepPlan) -> BusyKind:
    if plan.dummy:
        return BusyKind.DUMMY
    if not plan.num_chunks:
        return BusyKind.DECODE
    return BusyKind.PREFILL if plan.num_chunks == len(plan.rows) else BusyKind.MIXED
