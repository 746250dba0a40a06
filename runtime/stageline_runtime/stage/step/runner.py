"""One stage's step: accept a plan, get inputs, run the layers, send outputs. The same code for every role and
transport.

Plans run in `seq` order. Everything sent, received or sampled follows from the plan alone. The clock records each
change of state, and the watchdog each operation that could hang.

A plan's work is queued on the device, and its sampled rows reach the host later; a CPU is a device that has done its
work when a call returns.
"""

from collections.abc import Callable
from typing import Final, Protocol

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
from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import ComputeDevice, Event
from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.models.protocol import CutsHead, StageModel
from stageline_runtime.plan_bus.messages import BusProtocolError, PromptReport, StepPlan
from stageline_runtime.ranks.protocol import LoneRank, RankGroup
from stageline_runtime.stage.step.drafter import Drafter
from stageline_runtime.stage.step.host_tensors import int64s
from stageline_runtime.stage.step.pending_drafts import PendingDrafts
from stageline_runtime.stage.step.pending_rows import PendingRows
from stageline_runtime.stage.step.prompt_reports import PromptReports
from stageline_runtime.stage.step.rank_sampling import OtherRankSampling, PartDraws, share_sampled
from stageline_runtime.stage.step.sampling_state import SamplingState, sampled_token_indices
from stageline_runtime.stage.step.slot_tokens import SlotTokens
from stageline_runtime.stage.telemetry.state_clock import BusyKind, State, WaitReason
from stageline_runtime.transport.protocol import Transport

_NO_ROWS: Final = PendingRows.known(())


class Marks(Protocol):
    """Records each change of state: the state clock, or its substitute before a device."""

    def enter(self, state: State, operation: str = "") -> None:
        """The stage enters `state` now."""


class Watch(Protocol):
    """Records each operation that could hang."""

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
        device: ComputeDevice = HOST,
        drafter: Drafter | None = None,
        ranks: RankGroup | None = None,
        report_rows: int = 8,
        vocab_size: int = 0,
    ) -> None:
        """`drafter`: on the last stage's first rank, where the group has a draft model. `ranks`: of this stage.
        `report_rows`: over how many rows the head runs at once for log probabilities of prompts. `vocab_size` of the
        model: several ranks draw by parts of it, where they can; 0: they always gather the logits.
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
        self._device = device
        self._tokens = SlotTokens(num_slots, device)
        self._arrived: Event | None = None
        """The hidden tensor of a plan that the host waits for is here."""
        self._guides = guides
        self._ranks = ranks if ranks is not None else LoneRank()
        self._sampling: SamplingState | OtherRankSampling = SamplingState(guides, device)
        if self._ranks.rank > 0:
            self._sampling = OtherRankSampling(device)
        self._cut_head: CutsHead | None = None
        self._parts: PartDraws | None = None
        if self._ranks.size > 1 and self.is_last and vocab_size:
            assert isinstance(model, CutsHead), "ranks share a head that can't be had in parts"
            self._cut_head, self._parts = model, PartDraws(self._ranks, model.first_token, vocab_size)
        self._reports = PromptReports(model, report_rows, device)

    @property
    def is_first(self) -> bool:
        return self._stage == 0

    @property
    def is_last(self) -> bool:
        return self._stage == self._last

    @property
    def tells(self) -> bool:
        """Whether this process reports sampled tokens to the engine: the last stage's first rank."""
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

    def run(self, plan: StepPlan) -> PendingRows:
        """Queue one plan; returns the sampled rows (the last stage's; empty elsewhere).

        The caller must be in torch's inference mode.

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
        sampled = _NO_ROWS
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
            return torch.zeros(plan.padded_tokens, self._hidden_size, dtype=self._dtype, device=self._device.device)
        if self._tokens.due(plan.feedback_through):
            self._enter(WaitReason.FEEDBACK, plan, RECEIVE_FEEDBACK, self._last)
            self._tokens.apply_through(plan.feedback_through, self._transport.wait_feedback)
            self._enter(WaitReason.HOST, plan, "build inputs")
        return self._tokens.inputs(plan)

    def _receive(self, plan: StepPlan) -> Tensor:
        self._enter(WaitReason.RECV, plan, RECEIVE_HIDDEN, self._stage - 1)
        hidden = self._transport.wait_hidden(plan.seq)
        self._arrived = self._device.record() if self.is_last and _is_waited_for(plan) else None
        return hidden

    def _send(self, plan: StepPlan, hidden: Tensor) -> None:
        reason = WaitReason.SEND if self._transport.would_block() else WaitReason.HOST
        self._enter(reason, plan, SEND_HIDDEN, self._stage + 1)
        self._transport.send_hidden(plan.seq, hidden)

    def _sample(self, plan: StepPlan, hidden: Tensor) -> PendingRows:
        sampled = self._sample_from(plan, self._sampled_from(plan, hidden))
        if self._drafter is not None:
            self._drafter.take(plan, sampled)
        return sampled

    def _sample_from(self, plan: StepPlan, hidden_rows: Tensor) -> PendingRows:
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

    def _sample_logits(self, plan: StepPlan, logits: Tensor) -> PendingRows:
        if self._arrived is not None:
            self._await_arrival(plan, self._arrived)
        sampled, feedback = self._sampling.sample(plan, logits)
        self._send_feedback(plan, feedback)
        if _is_waited_for(plan):
            sampled.rows()
        return sampled

    def _await_arrival(self, plan: StepPlan, arrived: Event) -> None:
        """With drafts the host waits for the device: first for the peer's data, and records that state."""
        self._watchdog.watch(plan.seq, RECEIVE_HIDDEN, self._stage - 1)
        arrived.wait()
        self._watchdog.watch(plan.seq, FORWARD, None)

    def _sampled_from(self, plan: StepPlan, hidden: Tensor) -> Tensor:
        """The hidden states `[num_draws, hidden_size]` that the plan's sampled rows are drawn from."""
        if plan.num_tokens == len(plan.sampled_rows):
            # Every step that only decodes: nothing to gather, and without padding nothing to cut off.
            return hidden if plan.num_tokens == plan.padded_tokens else hidden[: plan.num_tokens]
        return hidden[self._device.place(int64s(sampled_token_indices(plan)))]

    def drafts_after(self, plan: StepPlan) -> bool:
        """Whether tokens are drafted here once the plan has been run."""
        return plan.draft_steps > 0 and self.tells

    def draft(self, plan: StepPlan) -> PendingDrafts | None:
        """Queue the draft steps of a plan behind it, before another plan is run. None where it has none."""
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


def _is_waited_for(plan: StepPlan) -> bool:
    """Whether the host must read the sampled tokens before it continues: the host decides how many drafts hold, and a
    draft model continues from ids. Drafts are sent where stages would be idle, so the wait costs the device little
    work."""
    return plan.draft_steps > 0 or plan.verifies_drafts
