"""One stage's step: take a plan, get inputs, run the layers, hand on. The same code for every role and transport.

Plans run in `seq` order. Everything sent, received or sampled follows from the plan alone; the clock is told at each
change of state and the watchdog of each operation that could hang.
"""

import torch
from torch import Tensor

from stageline_api.timeline import FORWARD, RECEIVE_FEEDBACK, RECEIVE_HIDDEN, SEND_FEEDBACK, SEND_HIDDEN
from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.messages import SampledRow, StepPlan
from stageline_runtime.models.protocol import StageModel
from stageline_runtime.stage.clock import BusyKind, StateClock, WaitReason
from stageline_runtime.stage.sampling_state import SamplingState, sampled_token_indices
from stageline_runtime.stage.slot_tokens import SlotTokens
from stageline_runtime.stage.watchdog import Watchdog
from stageline_runtime.transport.protocol import Transport


class StageRunner:
    """Runs plans for one stage; owns the stage's per-slot state."""

    def __init__(
        self,
        model: StageModel,
        transport: Transport,
        clock: StateClock,
        watchdog: Watchdog,
        *,
        stage: int,
        stage_count: int,
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        guides: GuideMaker | None = None,
    ) -> None:
        self._model = model
        self._transport = transport
        self._clock = clock
        self._watchdog = watchdog
        self._stage = stage
        self._last = stage_count - 1
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._tokens = SlotTokens(num_slots)
        self._sampling = SamplingState(guides)

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds."""
        return self._stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage samples."""
        return self._stage == self._last

    def accept(self, plan: StepPlan) -> None:
        """A plan has come off the bus: post what it will receive, ahead of running it."""
        if not self.is_first:
            self._transport.post_hidden(plan.seq, plan.padded_tokens)
        elif plan.feedback_posted:
            self._tokens.expect(plan)
            self._transport.post_feedback(plan.seq, len(plan.sampled_rows))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[SampledRow, ...]:
        """Run one plan; returns the sampled rows (the last stage's; empty elsewhere).

        Raises:
            PeerLostError: a neighbour is gone or did not answer in time.
        """
        self._fill(plan)
        batch = None if plan.is_heartbeat else self._model.attention_batch(plan)
        hidden = self._first_input(plan) if self.is_first else self._receive(plan)
        if batch is not None:
            self._busy(plan)
            if self.is_first:
                hidden = self._model.embed(hidden)
            hidden = self._model.layers(hidden, batch)
        sampled: tuple[SampledRow, ...] = ()
        if not self.is_last:
            self._send(plan, hidden)
        elif plan.sampled_rows:
            sampled = self._sample(plan, hidden)
        self._enter(WaitReason.HOST, plan, "")
        return sampled

    def _fill(self, plan: StepPlan) -> None:
        for fill in plan.fills:
            self._model.reset_slot(fill.slot)
            self._tokens.fill(fill)
        if self.is_last:
            self._sampling.accept(plan)

    def _first_input(self, plan: StepPlan) -> Tensor:
        """Token ids `[padded_tokens]`; for a heartbeat the hidden tensor `[padded_tokens, hidden_size]` itself."""
        if plan.is_heartbeat:
            return torch.zeros(plan.padded_tokens, self._hidden_size, dtype=self._dtype)
        if self._tokens.due(plan.feedback_through):
            self._enter(WaitReason.FEEDBACK, plan, RECEIVE_FEEDBACK, self._last)
            self._tokens.apply_through(plan.feedback_through, self._transport.wait_feedback)
            self._enter(WaitReason.HOST, plan, "build inputs")
        return self._tokens.inputs(plan)

    def _receive(self, plan: StepPlan) -> Tensor:
        self._enter(WaitReason.RECV, plan, RECEIVE_HIDDEN, self._stage - 1)
        return self._transport.wait_hidden(plan.seq)

    def _send(self, plan: StepPlan, hidden: Tensor) -> None:
        reason = WaitReason.SEND if self._transport.would_block() else WaitReason.HOST
        self._enter(reason, plan, SEND_HIDDEN, self._stage + 1)
        self._transport.send_hidden(plan.seq, hidden)

    def _sample(self, plan: StepPlan, hidden: Tensor) -> tuple[SampledRow, ...]:
        logits = self._model.head(hidden[sampled_token_indices(plan)])
        sampled, feedback = self._sampling.sample(plan, logits)
        if plan.feedback_posted:
            self._enter(WaitReason.HOST, plan, SEND_FEEDBACK, 0)
            self._transport.send_feedback(plan.seq, feedback)
        return sampled

    def _busy(self, plan: StepPlan) -> None:
        self._clock.enter(step_kind(plan), FORWARD)
        self._watchdog.watch(plan.seq, FORWARD, None)

    def _enter(self, reason: WaitReason, plan: StepPlan, operation: str, peer: int | None = None) -> None:
        self._clock.enter(reason, operation)
        if operation:
            self._watchdog.watch(plan.seq, operation, peer)
        else:
            self._watchdog.rest()


def step_kind(plan: StepPlan) -> BusyKind:
    """What a plan's compute counts as."""
    if plan.dummy:
        return BusyKind.DUMMY
    prefill = any(row.token_ids for row in plan.rows)
    decode = any(not row.token_ids for row in plan.rows)
    if prefill and decode:
        return BusyKind.MIXED
    return BusyKind.PREFILL if prefill else BusyKind.DECODE
