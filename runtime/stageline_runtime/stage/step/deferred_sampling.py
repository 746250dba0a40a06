"""The last stage's sampling on a device: tokens stay there for feedback, the host learns them later.

Only a request whose next token depends on what it has said (penalties, a grammar) needs its last token on the host
before its next draw. That token was sampled at least one plan of its cohort earlier, so its copy is mostly long done.

A plan that verifies drafts is waited for: how many hold is the host's to say. So is one that is to be drafted after: a
draft model goes on from ids. Drafts are sent where stages would have nothing to do, so the wait keeps little work from
the device.
"""

from functools import partial

import torch
from torch import Tensor

from stageline_runtime.accelerator.protocol import Accelerator, Event
from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, StepPlan
from stageline_runtime.sampling.device_sampler import sample_on_device
from stageline_runtime.sampling.logprobs import RawLogprobs
from stageline_runtime.stage.step.in_flight import Sampled
from stageline_runtime.stage.step.sampling_state import Draws, SamplingState, SlotSampling, draws_of, top_counts


def draws_on(accelerator: Accelerator) -> Draws:
    """How tokens are drawn there."""
    return Draws(partial(sample_on_device, place=accelerator.place), accelerator.place)


def is_waited_for(plan: StepPlan) -> bool:
    """Whether the host has to know what was sampled before it goes on."""
    return plan.draft_steps > 0 or any(row.num_drafts for row in plan.rows)


class DeferredSampling(SamplingState):
    """As `SamplingState`, but nothing waits for the device unless there are drafts."""

    def __init__(self, accelerator: Accelerator, guides: GuideMaker | None = None) -> None:
        super().__init__(guides, draws_on(accelerator))
        self._accelerator = accelerator
        self._newest: dict[int, DeferredRows] = {}
        """By slot: the newest sample of a request that needs its history."""

    def sample(self, plan: StepPlan, logits: Tensor) -> tuple[Sampled, Tensor]:  # type: ignore[override]
        """Sample the plan's rows from logits `[num_draws, vocab_size]` float32, which are overwritten.

        Returns the rows, those to come where nothing is waited for, and the feedback tensor `[num_sampled_rows, 2]` on
        the device.
        """
        rows = plan.sampled_rows
        slots = [self.live(row) for row in rows]
        for row, slot in zip(rows, slots, strict=True):
            if slot is not None and slot.needs_history and (earlier := self._newest.pop(row.slot, None)):
                earlier.rows()
        if is_waited_for(plan):
            return super().sample(plan, logits)
        place = self._accelerator.place
        logprobs = RawLogprobs(logits, top_counts(slots, rows), place)
        sampling, positions = draws_of(slots, rows)
        for index, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            if slot is not None and not slot.is_plain:
                slot.change(logits[index], position, place)
        tokens = sample_on_device(logits, sampling, positions, place)
        pending = DeferredRows(self._accelerator, rows, slots, tokens, logprobs)
        for row, slot in zip(rows, slots, strict=True):
            if slot is not None and slot.needs_history:
                self._newest[row.slot] = pending
        generations = place(torch.tensor([row.generation for row in rows], dtype=torch.int64))
        return pending, torch.stack((generations, tokens), dim=1)


class DeferredRows:
    """One plan's rows on their way to the host."""

    def __init__(
        self,
        accelerator: Accelerator,
        rows: tuple[PlanRow, ...],
        slots: list[SlotSampling | None],
        tokens: Tensor,
        logprobs: RawLogprobs,
    ) -> None:
        self._accelerator = accelerator
        self._plan_rows = rows
        self._slots = slots
        self._logprobs = logprobs
        self._on_device = (tokens, *logprobs.read(tokens))
        self._on_host: list[Tensor] = []
        self._copied: Event | None = None
        self._rows: tuple[SampledRow, ...] | None = None

    def copy_out(self) -> None:
        if self._copied is None:
            for tensor in self._on_device:
                target = self._accelerator.pinned(tuple(tensor.shape), tensor.dtype)
                self._accelerator.copy(target, tensor)
                self._on_host.append(target)
            self._copied = self._accelerator.main.record()

    @property
    def is_known(self) -> bool:
        return self._rows is not None

    @torch.inference_mode()
    def rows(self) -> tuple[SampledRow, ...]:
        """The rows, after waiting for the copy; the first call lets each request take its token."""
        if self._rows is None:
            self.copy_out()
            assert self._copied is not None
            self._copied.wait()
            tokens = self._on_host[0].tolist()
            for slot, token in zip(self._slots, tokens, strict=True):
                if slot is not None:
                    slot.take_output(token)
            self._rows = tuple(self._row(index, token) for index, token in enumerate(tokens))
        return self._rows

    def _row(self, index: int, token: int) -> SampledRow:
        planned, slot = self._plan_rows[index], self._slots[index]
        failure = slot.failure if slot is not None else None
        return SampledRow(planned.slot, planned.generation, token, self._logprobs.of(index, self._on_host[1:]), failure)
