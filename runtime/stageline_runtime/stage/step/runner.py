"""One stage's step: take a plan, get inputs, run the layers, hand on. The same code for every role and transport.

Plans run in `seq` order. Everything sent, received or sampled follows from the plan alone; the clock is told at each
change of state and the watchdog of each operation that could hang.
"""

from typing import Protocol

import torch
from torch import Tensor

from stageline_api.telemetry.timeline import FORWARD, RECEIVE_FEEDBACK, RECEIVE_HIDDEN, SEND_FEEDBACK, SEND_HIDDEN
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.models.protocol import StageModel
from stageline_runtime.models.stage_shape import CPU
from stageline_runtime.plan_bus.messages import StepPlan
from stageline_runtime.stage.step.deferred_sampling import DeferredSampling
from stageline_runtime.stage.step.device_tokens import DeviceSlotTokens
from stageline_runtime.stage.step.sampling_state import SamplingState, sampled_token_indices
from stageline_runtime.stage.step.slot_tokens import SlotTokens
from stageline_runtime.stage.step.step_results import Sampled
from stageline_runtime.stage.telemetry.state_clock import BusyKind, State, WaitReason
from stageline_runtime.transport.protocol import Transport


class Marks(Protocol):
    """Is told of each change of state: the state clock, or what stands in for it before a device."""

    def enter(self, state: State, operation: str = "") -> None:
        """From here on the stage is in `state`."""


class Watch(Protocol):
    """Is told of each operation that could hang."""

    def watch(self, step: int, operation: str, peer: int | None) -> None:
        """An operation begins; it replaces the one before."""

    def rest(self) -> None:
        """Nothing that could hang is under way."""


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
    ) -> None:
        self._model = model
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
        self._sampling = SamplingState(guides) if accelerator is None else DeferredSampling(accelerator, guides)

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
    def run(self, plan: StepPlan) -> Sampled:
        """Run one plan; returns the sampled rows (the last stage's; empty elsewhere). On a device: queue it.

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
        sampled: Sampled = ()
        if not self.is_last:
            self._send(plan, hidden)
        elif plan.sampled_rows:
            sampled = self._sample(plan, hidden)
        self._enter(WaitReason.HOST, plan, "")
        return sampled

    def _fill(self, plan: StepPlan) -> None:
        for trim in plan.trims:
            self._model.trim_slot(trim.slot, trim.num_tokens)
        for fill in plan.fills:
            if fill.copy_from is None:
                self._model.reset_slot(fill.slot, fill.cached_tokens)
            else:
                self._model.reset_slot(fill.slot)
                self._model.copy_slot(fill.copy_from, fill.slot, fill.cached_tokens)
            self._tokens.fill(fill)
        if self.is_last:
            self._sampling.accept(plan)

    def _first_input(self, plan: StepPlan) -> Tensor:
        """Token ids `[padded_tokens]`; for a heartbeat the hidden tensor `[padded_tokens, hidden_size]` itself."""
        if plan.is_heartbeat:
            return torch.zeros(plan.padded_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
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

    def _sample(self, plan: StepPlan, hidden: Tensor) -> Sampled:
        indices = torch.tensor(sampled_token_indices(plan))
        logits = self._model.head(hidden[indices if self._accelerator is None else self._accelerator.place(indices)])
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
