"""The last stage's memory of how each slot's request samples, and the tensor work around the sampler.

Everything here can be rebuilt from token ids: inputs arrive in the plans' rows and fills, output is sampled here. The
state of a slot belongs to one generation; a row of another one, which runs dead, samples from its logits alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stageline_runtime.guided.guide import Guide, GuideMaker
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SampledRow, SlotFill, StepPlan
from stageline_runtime.sampling.adjustments import Placing, SeenTokens, adjust, stay
from stageline_runtime.sampling.logprobs import RawLogprobs
from stageline_runtime.sampling.sampler import sample


@dataclass(slots=True)
class SlotSampling:
    """One request's parameters and what it has said so far."""

    generation: int
    sampling: RequestSampling
    seen: SeenTokens | None
    guide: Guide | None

    def take_inputs(self, position: int, token_ids: tuple[int, ...]) -> None:
        """Take inputs from `position` on; tokens behind the prompt's end are output generated before."""
        border = min(max(self.sampling.num_prompt_tokens - position, 0), len(token_ids))
        if self.seen is not None:
            self.seen.add_prompt(token_ids[:border])
            self.seen.add_output(token_ids[border:])
        if self.guide is not None and token_ids[border:]:
            self.guide.take(token_ids[border:])

    @property
    def needs_history(self) -> bool:
        """Whether what it has said changes what it says next."""
        return self.seen is not None or self.guide is not None

    def change(self, logits: Tensor, place: Placing = stay) -> None:
        """Bias, penalise and mask the request's logits `[vocab_size]` in place."""
        adjust(logits, self.sampling, self.seen, place)
        if self.guide is not None:
            self.guide.mask(logits, place)

    def take_output(self, token: int) -> None:
        if self.seen is not None:
            self.seen.add_output((token,))
        if self.guide is not None:
            self.guide.take((token,))

    @property
    def failure(self) -> str | None:
        return None if self.guide is None else self.guide.failure


class SamplingState:
    """Sampling parameters and history by slot; filled by the plan that gives the slot out."""

    def __init__(self, guides: GuideMaker | None = None) -> None:
        """`guides` is needed by requests with a schema only."""
        self._guides = guides
        self._by_slot: dict[int, SlotSampling] = {}

    def accept(self, plan: StepPlan) -> None:
        """Take a plan's fills and prompt tokens; called once for each plan, in order, before `sample`."""
        for fill in plan.fills:
            self._fill(fill)
        for row in plan.rows:
            if row.token_ids and (slot := self.live(row)) is not None:
                slot.take_inputs(row.position, row.token_ids)

    def sample(self, plan: StepPlan, logits: Tensor) -> tuple[tuple[SampledRow, ...], Tensor]:
        """Sample the plan's rows from logits `[num_sampled_rows, vocab_size]` float32, which are overwritten.

        Returns the rows for the engine and the feedback tensor `[num_sampled_rows, 3]` for the first stage.
        """
        rows = plan.sampled_rows
        slots = [self.live(row) for row in rows]
        logprobs = RawLogprobs(logits, top_counts(slots))
        for index, slot in enumerate(slots):
            if slot is not None:
                slot.change(logits[index])
        drawn = sample(logits, *draws_of(slots, rows))
        tokens, read = drawn.tolist(), logprobs.read(drawn)
        for slot, token in zip(slots, tokens, strict=True):
            if slot is not None:
                slot.take_output(token)
        sampled = tuple(
            SampledRow(row.slot, row.generation, token, logprobs.of(index, read), slot.failure if slot else None)
            for index, (row, slot, token) in enumerate(zip(rows, slots, tokens, strict=True))
        )
        feedback = torch.tensor([[row.generation, 1, row.token] for row in sampled], dtype=torch.int64)
        return sampled, feedback

    def _fill(self, fill: SlotFill) -> None:
        sampling = fill.sampling
        seen = SeenTokens() if sampling.has_penalties else None
        guide = None
        if sampling.json_schema is not None:
            assert self._guides is not None, "a stage without grammars was given a schema"
            guide = self._guides.start(sampling.json_schema)
        slot = self._by_slot[fill.slot] = SlotSampling(fill.generation, sampling, seen, guide)
        slot.take_inputs(0, fill.cached_token_ids)

    def live(self, row: PlanRow) -> SlotSampling | None:
        """The state of a row's request; None for a row that runs dead."""
        slot = self._by_slot.get(row.slot)
        return slot if slot is not None and slot.generation == row.generation else None


def top_counts(slots: list[SlotSampling | None]) -> list[int | None]:
    """How many tokens to list with each row's, None where nobody asks."""
    return [None if slot is None else slot.sampling.num_top_logprobs for slot in slots]


def draws_of(slots: list[SlotSampling | None], rows: tuple[PlanRow, ...]) -> tuple[list[RequestSampling], list[int]]:
    """Parameters of each row's draw, and the position of the token that it draws."""
    # A row without a slot runs dead: its token is dropped, so the cheapest draw will do.
    sampling = [RequestSampling(temperature=0.0) if slot is None else slot.sampling for slot in slots]
    return sampling, [row.position + row.num_tokens for row in rows]


def sampled_token_indices(plan: StepPlan) -> list[int]:
    """Index within the step of the token whose hidden state each sampled row is sampled from."""
    indices = []
    offset = 0
    for row in plan.rows:
        offset += row.num_tokens
        if row.need_sample:
            indices.append(offset - 1)
    return indices
