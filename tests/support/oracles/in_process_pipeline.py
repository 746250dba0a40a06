"""Runs all stages of a model in one process, one plan after the other, with a small continuous-batching planner.

It stands in for the engine, the bus and the transport, so that a wrong token can only come from the stages' compute.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.models.families import build_any_stage_model
from stageline_runtime.models.protocol import ModelBuilder, StageModel, StageShape
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotBlocks, SlotFill, StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of
from stageline_runtime.planning.cut import cut_layers, estimate_costs

GREEDY = RequestSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0)


@dataclass
class Request:
    """A prompt and what has been generated for it so far."""

    prompt: list[int]
    max_tokens: int
    slot: int = -1
    generation: int = 0
    computed: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_tokens


def build_stages(
    model_dir: Path,
    stage_count: int,
    *,
    dtype: torch.dtype,
    slots_per_cohort: int,
    slot_tokens: int,
    build_model: ModelBuilder = build_any_stage_model,
) -> list[StageModel]:
    """Load every stage of a model cut by estimated cost; there are as many cohorts as stages."""
    config = read_model_config(model_dir)
    costs = estimate_costs(config)
    ranges = cut_layers(
        config.num_layers,
        stage_count,
        layer_cost=costs.layer,
        embedding_cost=costs.embedding,
        head_cost=costs.head,
    )
    return [
        build_model(
            model_dir,
            config,
            StageShape(
                layers=layers,
                is_first=stage == 0,
                is_last=stage == stage_count - 1,
                dtype=dtype,
                num_cohorts=stage_count,
                num_slots=stage_count * slots_per_cohort,
                slot_tokens=slot_tokens,
            ),
            _ignore_progress,
        )
        for stage, layers in enumerate(ranges)
    ]


def _ignore_progress(_loaded_bytes: int, _total_bytes: int) -> None:
    pass


class InProcessPipeline:
    """Cohorts take turns; requests wait for a free slot, are prefilled in chunks and mixed with decodes."""

    def __init__(
        self,
        stages: list[StageModel],
        *,
        slots_per_cohort: int,
        chunk_tokens: int,
        padded_tokens: Callable[[int], int] = lambda tokens: tokens,
    ) -> None:
        self.stages = stages
        self.mixed_steps = 0
        self._slots_per_cohort = slots_per_cohort
        self._chunk_tokens = chunk_tokens
        self._padded_tokens = padded_tokens
        self._cohorts: list[dict[int, Request]] = [{} for _ in stages]
        self._sequence = count()
        self._free_blocks: list[int] = []
        self._num_blocks = 0
        self._blocks: dict[int, tuple[int, ...]] = {}
        """By slot; what was given back is used again first, so that few of them are neighbours after a while."""

    def generate(self, requests: list[Request]) -> None:
        """Run greedy decoding until every request has its `max_tokens`."""
        waiting = list(requests)
        while waiting or any(self._cohorts):
            for cohort, running in enumerate(self._cohorts):
                fills = self.admit(cohort, waiting)
                if running:
                    self._step(cohort, fills)

    def is_running(self, cohort: int | None = None) -> bool:
        """Whether a request has a slot of the cohort, or of any."""
        return any(self._cohorts) if cohort is None else bool(self._cohorts[cohort])

    def admit(self, cohort: int, waiting: list[Request]) -> tuple[SlotFill, ...]:
        """Give free slots to those that wait."""
        running = self._cohorts[cohort]
        fills: list[SlotFill] = []
        first = cohort * self._slots_per_cohort
        for slot in range(first, first + self._slots_per_cohort):
            # At most two new requests per step, so that prefills and decodes meet in one plan.
            if waiting and slot not in running and len(fills) < 2:
                request = waiting.pop(0)
                request.slot, request.generation = slot, request.generation + 1
                running[slot] = request
                self._free_blocks += self._blocks.pop(slot, ())
                self._blocks[slot] = self._take_blocks(blocks_of(len(request.prompt) + request.max_tokens))
                fills.append(SlotFill(slot=slot, generation=request.generation, sampling=GREEDY))
        return tuple(fills)

    def _take_blocks(self, count: int) -> tuple[int, ...]:
        missing = max(0, count - len(self._free_blocks))
        self._free_blocks += range(self._num_blocks, self._num_blocks + missing)
        self._num_blocks += missing
        return tuple(self._free_blocks.pop() for _ in range(count))

    def _step(self, cohort: int, fills: tuple[SlotFill, ...]) -> None:
        plan = self.plan(cohort, fills)
        self.apply(plan, self.forward(plan))

    def plan(self, cohort: int, fills: tuple[SlotFill, ...]) -> StepPlan:
        """The next step of the cohort's requests."""
        rows = tuple(self._row(request) for request in self._cohorts[cohort].values())
        kinds = {row.num_tokens == 1 for row in rows}
        self.mixed_steps += len(kinds) == 2
        return StepPlan(
            seq=next(self._sequence),
            cohort=cohort,
            fills=fills,
            rows=rows,
            padded_tokens=self._padded_tokens(sum(row.num_tokens for row in rows)),
            feedback_through=-1,
            feedback_posted=False,
            dummy=False,
            tables=tuple(SlotBlocks(fill.slot, 0, self._blocks[fill.slot], are_new=True) for fill in fills),
        )

    def _row(self, request: Request) -> PlanRow:
        tokens = (request.prompt + request.output)[request.computed :][: self._chunk_tokens]
        return PlanRow(
            slot=request.slot,
            generation=request.generation,
            position=request.computed,
            num_tokens=len(tokens),
            token_ids=tuple(tokens),
            need_sample=request.computed + len(tokens) == len(request.prompt) + len(request.output),
        )

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits of each row's last token; none of a dummy plan's."""
        token_ids = torch.zeros(plan.padded_tokens, dtype=torch.int64)
        token_ids[: plan.num_tokens] = torch.tensor(
            [token for row in plan.rows for token in row.token_ids], dtype=torch.int64
        )
        hidden = self.stages[0].embed(token_ids)
        for stage in self.stages:
            stage.change_tables(plan.tables)
            hidden = stage.layers(hidden, stage.step_batch(plan))
        ends = torch.tensor([row.num_tokens for row in plan.rows], dtype=torch.int64).cumsum(0) - 1
        return self.stages[-1].head(hidden[ends])

    def apply(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Tell the plan's requests what was sampled."""
        running = self._cohorts[plan.cohort]
        for row, token in zip(plan.rows, logits.argmax(dim=-1).tolist(), strict=True):
            request = running[row.slot]
            request.computed += row.num_tokens
            if row.need_sample:
                request.output.append(token)
            if request.finished:
                del running[request.slot]
