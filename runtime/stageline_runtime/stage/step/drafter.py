"""The last stage's draft model: a whole small model in one process, which says what may come after what was sampled.

It keeps keys and values of its own in slots of the same numbers, filled, trimmed and copied by the same plans, and
computes nothing until a plan wants drafts. Then it first catches up with what it has missed, at most a step's tokens
at a time, and draws one token after another, each with the noise, bias and exclusions that the request's own draw at
that position will have. So where both models think alike they draw alike, greedy or not. Penalties count what is known;
a grammar masks the first draft. Whatever it says, only the verifying row decides.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from stageline_runtime.models.protocol import StageModel
from stageline_runtime.plan_bus.messages import Drafted, DraftedRow, PlanRow, RequestSampling, SampledRow, StepPlan
from stageline_runtime.plan_bus.step_plan import padded_size
from stageline_runtime.sampling.sampler import sample
from stageline_runtime.speculation.draft_history import DraftHistory
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


@dataclass(slots=True)
class _Row:
    """A row while it is drafted for."""

    planned: PlanRow
    sampling: SlotSampling | None
    next_position: int = 0
    """Of the token that is drafted next."""
    tokens: list[int] = field(default_factory=list)

    def said(self) -> DraftedRow:
        first = self.next_position - len(self.tokens)
        return DraftedRow(self.planned.slot, self.planned.generation, first, tuple(self.tokens))


@dataclass(frozen=True, slots=True)
class _Input:
    """What the draft model computes of one row in one step."""

    row: _Row
    position: int
    ids: Sequence[int]
    draws: bool = True
    """Whether the next token is drafted from its end."""


class Drafter:
    """Drafts for one group's plans, in plan order."""

    def __init__(
        self, stage: DraftStage, *, num_slots: int, max_step_tokens: int, vocab_size: int, token_bytes: int = 0
    ) -> None:
        """`max_step_tokens`: most that it catches up with at once. `vocab_size` is that of the model it drafts for,
        `token_bytes` what one token's keys and values take here.
        """
        self.token_bytes = token_bytes
        self._model = stage.model
        self._stage = stage
        self._history = DraftHistory(num_slots)
        self._max_step_tokens = max_step_tokens
        self._vocab_size = vocab_size

    def accept(self, plan: StepPlan) -> None:
        """Take a plan's trims, fills and inputs; called for each plan, in order, before `take`."""
        for trim in plan.trims:
            self._history.trim(trim.slot, trim.num_tokens)
            self._model.trim_slot(trim.slot, trim.num_tokens)
        for fill in plan.fills:
            computed = self._history.fill(fill.slot, fill.generation, fill.copy_from, fill.cached_tokens)
            if fill.copy_from is None:
                self._model.reset_slot(fill.slot, computed)
            else:
                self._model.reset_slot(fill.slot)
                self._model.copy_slot(fill.copy_from, fill.slot, computed)
        for row in plan.rows:
            if row.is_chunk and self._history.is_current(row.slot, row.generation):
                self._history.take(row.slot, row.position, row.token_ids)

    def take(self, plan: StepPlan, sampled: Sequence[SampledRow]) -> None:
        """Take what was sampled for a plan's rows."""
        for planned, row in zip(plan.sampled_rows, sampled, strict=True):
            if row.num_sampled and row.failure is None and self._history.is_current(row.slot, row.generation):
                tokens = (*planned.token_ids[1 : row.num_sampled], row.token) if planned.num_drafts else (row.token,)
                self._history.take(row.slot, planned.position + planned.num_tokens - planned.num_drafts, tokens)

    @torch.inference_mode()
    def draft(self, plan: StepPlan, sampling_of: SamplingOf) -> Drafted:
        """Run the plan's draft steps; an entry for each of its rows that wants drafts."""
        if plan.dummy:
            return Drafted(plan.seq, (), self._time_steps(plan))
        rows = [_Row(planned, sampling_of(planned)) for planned in plan.drafted_rows]
        here = [row for row in rows if self._history.is_current(row.planned.slot, row.planned.generation)]
        inputs = self._missed(here)
        began, steps = time.perf_counter(), 1
        self._step(plan.seq, inputs)
        if sum(len(each.ids) for each in inputs) > MOST_TIMED_TOKENS:
            began, steps = time.perf_counter(), 0
        drafting = [each.row for each in inputs if each.draws]
        for _ in range(plan.draft_steps - 1):
            drafting = [row for row in drafting if row.next_position <= self._stage.context_tokens]
            if not drafting:
                break
            self._step(plan.seq, [_Input(row, row.next_position - 1, row.tokens[-1:]) for row in drafting])
            steps += 1
        seconds = (time.perf_counter() - began) / steps if steps and inputs else 0.0
        return Drafted(plan.seq, tuple(row.said() for row in rows), seconds)

    def _missed(self, rows: Sequence[_Row]) -> list[_Input]:
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

    def _step(self, seq: int, inputs: Sequence[_Input]) -> None:
        """Compute the inputs, and draft the next token of those that are at their end."""
        if not inputs:
            return
        rows, ids, ends = list[PlanRow](), list[int](), list[int]()
        for each in inputs:
            planned = each.row.planned
            self._history.compute(planned.slot, each.position, each.ids)
            count = len(each.ids)
            rows.append(PlanRow(planned.slot, planned.generation, each.position, count, tuple(each.ids), each.draws))
            ids += each.ids
            ends += [len(ids) - 1] if each.draws else []
        hidden = self._forward(_plan_of(seq, tuple(rows)), ids)
        if ends:
            self._draw([each.row for each in inputs if each.draws], self._logits(hidden[torch.tensor(ends)]))

    def _forward(self, plan: StepPlan, ids: list[int]) -> Tensor:
        """Hidden `[padded_tokens, hidden_size]` of all of a step's ids."""
        padded = torch.tensor(ids + [0] * (plan.padded_tokens - len(ids)), dtype=torch.int64)
        # Where the model's vocabulary is padded further than this one's, an id may have no place here.
        known = padded.clamp_(max=self._stage.vocab_size - 1)
        return self._model.layers(self._model.embed(known), self._model.attention_batch(plan))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits `[num_rows, vocab_size]` of as many ids as the model has; those that only one of them has are out."""
        logits = self._model.head(hidden)[:, : self._vocab_size]
        return F.pad(logits, (0, self._vocab_size - logits.shape[1]), value=float("-inf"))

    @staticmethod
    def _draw(rows: Sequence[_Row], logits: Tensor) -> None:
        for row, own in zip(rows, logits, strict=True):
            if row.sampling is not None:
                row.sampling.change(own, row.next_position, masks=not row.tokens)
        asked = [_GREEDY if row.sampling is None else row.sampling.sampling for row in rows]
        drawn = sample(logits, asked, [row.next_position for row in rows]).tolist()
        for row, token in zip(rows, drawn, strict=True):
            row.tokens.append(token)
            row.next_position += 1

    def _time_steps(self, plan: StepPlan) -> float:
        """What a step of one row takes, on the average: of nothing, through all layers and the head."""
        began = time.perf_counter()
        for _ in range(plan.draft_steps):
            hidden = self._forward(_plan_of(plan.seq, ()), [0])
            sample(self._logits(hidden[:1]), [_GREEDY], [1])
        return (time.perf_counter() - began) / plan.draft_steps


def _plan_of(seq: int, rows: tuple[PlanRow, ...]) -> StepPlan:
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
    )
