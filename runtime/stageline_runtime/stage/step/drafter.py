"""The last stage's draft model: a whole small model in one process that drafts the tokens after the sampled ones.

It stores its own keys and values in blocks with the same numbers, which the same plans allocate, and computes nothing
until a plan wants drafts. Then it first catches up with the missing positions, at most a step's tokens at a time. It
draws one token after another, each with the noise, bias and exclusions of the request's own draw at that position. So
where both models agree they draw the same token, greedy or not. Penalties count known tokens; a grammar masks the first
draft. Whatever it drafts, only the verifying row decides.

On a device its steps are queued right behind the plan that wants them, after the host has waited for that plan's
tokens. Slots, positions and sizes of a step follow from the plan; the ids that a step draws are the next step's input
on the device. Its layers run captured where the group's do.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import ComputeDevice
from stageline_runtime.models.protocol import StageModel
from stageline_runtime.plan_bus.messages import GraphMode, PlanRow, RequestSampling, SampledRow, SlotBlocks, StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of, padded_size, plan_graph_mode
from stageline_runtime.sampling.device_sampler import sample_on_device
from stageline_runtime.speculation.draft_history import DraftHistory
from stageline_runtime.stage.step.host_tensors import int64s
from stageline_runtime.stage.step.pending_drafts import DraftingRow, PendingDrafts
from stageline_runtime.stage.step.pending_rows import PendingRows
from stageline_runtime.stage.step.sampling_state import SlotSampling

MOST_TIMED_TOKENS = 16
"""Of a first step that counts as one like the others; more is catching up."""
_GREEDY = RequestSampling(temperature=0.0)
SamplingOf = Callable[[PlanRow], SlotSampling | None]
"""How a row's request samples; None where another request has its slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStage:
    """A loaded draft model and what it can take."""

    model: StageModel
    vocab_size: int
    """Its own."""
    context_tokens: int
    """Positions of a slot that it was made for, and has room for."""


@dataclass(frozen=True, slots=True)
class _Input:
    """What the draft model computes of one row before it drafts."""

    row: DraftingRow
    position: int
    ids: Sequence[int]
    draws: bool = True
    """Whether the next token is drafted from its end."""


class Drafter:
    """Drafts for one group's plans, in plan order."""

    def __init__(
        self,
        stage: DraftStage,
        *,
        num_slots: int,
        max_step_tokens: int,
        vocab_size: int,
        device: ComputeDevice = HOST,
        graphs: GraphMode = GraphMode.OFF,
    ) -> None:
        """`max_step_tokens`: maximum number of tokens that it catches up with at once. `vocab_size` belongs to the
        model it drafts for, `graphs` are the captured parts of the draft model."""
        self._model = stage.model
        self._stage = stage
        self._num_slots = num_slots
        self._history = DraftHistory(num_slots)
        self._max_step_tokens = max_step_tokens
        self._vocab_size = vocab_size
        self._device = device
        self._graphs = graphs
        self._sampled: deque[tuple[StepPlan, PendingRows]] = deque()
        """Plans in order, with tokens that the history doesn't have yet."""

    def accept(self, plan: StepPlan) -> None:
        """Apply a plan's tables, fills and inputs; called for each plan, in order, before `take`.

        The engine knew the tokens that they depend on, so the history has them, though later tokens are still in
        flight.
        """
        self._learn_sampled(waits=False)
        self._model.change_tables([self._within_context(change) for change in plan.tables])
        for change in plan.tables:
            self._history.change(change)
        for fill in plan.fills:
            self._history.fill(fill)
        for row in plan.rows:
            if row.is_chunk and self._history.is_current(row.slot, row.generation):
                self._history.take(row.slot, row.position, row.token_ids)

    def take(self, plan: StepPlan, sampled: PendingRows) -> None:
        """Accept the tokens sampled for a plan's rows, which may still be in flight."""
        self._sampled.append((plan, sampled))

    @torch.inference_mode()
    def draft(self, plan: StepPlan, sampling_of: SamplingOf) -> PendingDrafts:
        """Run the plan's draft steps, on a device queue them; the drafts have an entry for each row that wants some."""
        self._learn_sampled(waits=True)
        if plan.dummy:
            return self._time_steps(plan)
        rows = [DraftingRow(planned, sampling_of(planned)) for planned in plan.drafted_rows]
        drafts = PendingDrafts(plan.seq, rows, self._device, self._keep)
        here = [row for row in rows if self._history.is_current(row.planned.slot, row.planned.generation)]
        inputs = self._missed(here)
        if inputs:
            self._run_steps(plan, inputs, drafts)
        drafts.end()
        return drafts

    def forget(self) -> None:
        """Give up every slot; before plans of a group are run."""
        self._history, self._sampled = DraftHistory(self._num_slots), deque()

    def _within_context(self, change: SlotBlocks) -> SlotBlocks:
        """The same without what lies behind the positions that it has."""
        end = blocks_of(self._stage.context_tokens)
        start = min(change.start, end)
        return SlotBlocks(change.slot, start, change.blocks[: end - start], change.are_new)

    def _run_steps(self, plan: StepPlan, inputs: Sequence[_Input], drafts: PendingDrafts) -> None:
        rows = [each.row for each in inputs if each.draws]
        drafts.begin_timing()
        newest = self._catch_up(plan.seq, inputs)
        drafts.add(rows, newest)
        if sum(len(each.ids) for each in inputs) > MOST_TIMED_TOKENS:
            drafts.begin_timing()
        for _ in range(plan.draft_steps - 1):
            going = [index for index, row in enumerate(rows) if row.next_position <= self._stage.context_tokens]
            if not going:
                return
            if len(going) < len(rows):
                rows = [rows[index] for index in going]
                newest = newest[self._device.place(int64s(going))]
            newest = self._go_on(plan.seq, rows, newest)
            drafts.add(rows, newest)

    def _missed(self, rows: Sequence[DraftingRow]) -> list[_Input]:
        """What has to be computed before the rows' next tokens can be drafted, as much as one step has room for."""
        room = self._max_step_tokens
        inputs: list[_Input] = []
        for row in rows:
            position, ids = self._history.pending(row.planned.slot)
            row.next_position = position + len(ids)
            if room and row.next_position <= self._stage.context_tokens:
                inputs.append(_Input(row, position, ids[:room], draws=len(ids) <= room))
                room -= min(len(ids), room)
        return inputs

    def _catch_up(self, seq: int, inputs: Sequence[_Input]) -> Tensor:
        """Compute the missing positions; the next tokens `[num_draws]` of the rows that are at their end."""
        rows, ids, ends = list[PlanRow](), list[int](), list[int]()
        for each in inputs:
            planned = each.row.planned
            self._history.compute(planned.slot, each.position, each.ids)
            count = len(each.ids)
            rows.append(PlanRow(planned.slot, planned.generation, each.position, count, tuple(each.ids), each.draws))
            ids += each.ids
            ends += [len(ids) - 1] if each.draws else []
        place = self._device.place
        hidden = self._forward(self._plan_of(seq, tuple(rows)), place(int64s(ids)))
        if not ends:
            return torch.empty(0, dtype=torch.int64, device=hidden.device)
        return self._draw([each.row for each in inputs if each.draws], self._logits(hidden[place(int64s(ends))]))

    def _go_on(self, seq: int, rows: Sequence[DraftingRow], newest: Tensor) -> Tensor:
        """The tokens `[num_rows]` after the `newest` drafts, which are computed."""
        planned = tuple(
            PlanRow(row.planned.slot, row.planned.generation, row.next_position - 1, 1, (), need_sample=True)
            for row in rows
        )
        hidden = self._forward(self._plan_of(seq, planned), newest)
        return self._draw(rows, self._logits(hidden[: len(rows)]))

    def _forward(self, plan: StepPlan, ids: Tensor) -> Tensor:
        """Hidden `[padded_tokens, hidden_size]` of a step's `ids` `[num_tokens]`."""
        # Where the model's vocabulary is padded further than this one's, an id may have no place here.
        known = F.pad(ids, (0, plan.padded_tokens - len(ids))).clamp(max=self._stage.vocab_size - 1)
        return self._model.layers(self._model.embed(known), self._model.step_batch(plan))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits `[num_rows, vocab_size]` of as many ids as the model has; those that only one of them has are out."""
        logits = self._model.head(hidden)[:, : self._vocab_size]
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _draw(self, rows: Sequence[DraftingRow], logits: Tensor) -> Tensor:
        for row, own in zip(rows, logits, strict=True):
            if row.sampling is not None:
                row.sampling.change(own, row.next_position, self._device.place, masks=row.num_drafted == 0)
        asked = [_GREEDY if row.sampling is None else row.sampling.sampling for row in rows]
        drawn = sample_on_device(logits, asked, [row.next_position for row in rows], self._device.place)
        for row in rows:
            row.num_drafted += 1
            row.next_position += 1
        return drawn

    def _keep(self, row: DraftingRow, drafts: Sequence[int]) -> None:
        """The keys of a row's drafts are stored, except the last draft's, unless its slot was released in between."""
        slot, first = row.planned.slot, row.next_position - len(drafts)
        if self._history.is_current(slot, row.planned.generation) and self._history.computed(slot) >= first:
            self._history.compute(slot, first, drafts[:-1])

    def _learn_sampled(self, *, waits: bool) -> None:
        """Record sampled tokens, in plan order: all that the host knows, or with `waits` all."""
        while self._sampled:
            plan, sampled = self._sampled[0]
            if not (waits or sampled.is_known):
                return
            self._sampled.popleft()
            self._take(plan, sampled.rows())

    def _take(self, plan: StepPlan, sampled: Sequence[SampledRow]) -> None:
        for planned, row in zip(plan.sampled_rows, sampled, strict=True):
            if row.failure is None and self._history.is_current(row.slot, row.generation):
                tokens = (*planned.token_ids[1 : row.num_sampled], row.token) if planned.num_drafts else (row.token,)
                self._history.take(row.slot, planned.position + planned.num_tokens - planned.num_drafts, tokens)

    def _time_steps(self, plan: StepPlan) -> PendingDrafts:
        """Steps of no row, through all layers and the head."""
        drafts = PendingDrafts(plan.seq, (), self._device)
        newest = self._device.place(torch.zeros(1, dtype=torch.int64))
        for _ in range(plan.draft_steps):
            hidden = self._forward(self._plan_of(plan.seq, ()), newest)
            newest = sample_on_device(self._logits(hidden[:1]), [_GREEDY], [1], self._device.place)
            drafts.add((), newest)
        drafts.end()
        return drafts

    def _plan_of(self, seq: int, rows: tuple[PlanRow, ...]) -> StepPlan:
        """One step of the draft model, as models take them; without rows, of padding alone."""
        return StepPlan(
            seq=seq,
            cohort=0,
            fills=(),
            rows=rows,
            padded_tokens=padded_size(max(1, sum(row.num_tokens for row in rows))),
            feedback_through=-1,
            feedback_posted=False,
            dummy=not rows,
            graph_mode=plan_graph_mode(self._graphs, rows, dummy=not rows),
        )
