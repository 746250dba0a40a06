"""Runs a model whose stages' experts are cut over ranks, in one process: a thread for each rank, plan after plan.

Each rank has requests of its own, and runs all stages for them. What stands in for the engine gives every rank a plan
of the same padded size in each step; a rank without requests in the cohort gets a dummy one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from oracles.in_process_pipeline import InProcessPipeline, Request, build_stages
from oracles.thread_ranks import ThreadRanks
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.families import build_any_stage_model
from stageline_runtime.models.protocol import LoadProgress, ModelBuilder, StageModel, StageShape
from stageline_runtime.plan_bus.messages import StepPlan
from stageline_runtime.plan_bus.step_plan import padded_size
from stageline_runtime.ranks.protocol import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that `rank` gets before step `step`."""

    step: int
    rank: int
    request: Request


class ExpertRanks:
    """`stages_of_rank[rank][stage]` is built with that rank's end of the stage's exchanges.

    `idle_plans` counts the dummy plans that a rank ran while another worked.
    """

    def __init__(self, stages_of_rank: list[list[StageModel]], *, slots_per_cohort: int, chunk_tokens: int) -> None:
        self.pipelines = [
            InProcessPipeline(stages, slots_per_cohort=slots_per_cohort, chunk_tokens=chunk_tokens)
            for stages in stages_of_rank
        ]
        self.idle_plans = [0] * len(self.pipelines)
        self._waiting: list[list[Request]] = [[] for _ in self.pipelines]
        self._num_cohorts = len(stages_of_rank[0])
        self._pool = ThreadPoolExecutor(
            len(self.pipelines), initializer=torch.set_num_threads, initargs=(1,), thread_name_prefix="rank"
        )

    def generate(self, arrivals: list[Arrival]) -> None:
        """Run greedy decoding until every request has its `max_tokens`."""
        coming = sorted(arrivals, key=lambda arrival: arrival.step)
        step = 0
        while coming or any(self._waiting) or any(pipeline.is_running() for pipeline in self.pipelines):
            while coming and coming[0].step <= step:
                arrival = coming.pop(0)
                self._waiting[arrival.rank].append(arrival.request)
            self._step(step % self._num_cohorts)
            step += 1

    def _step(self, cohort: int) -> None:
        plans = [
            pipeline.plan(cohort, pipeline.admit(cohort, waiting))
            for pipeline, waiting in zip(self.pipelines, self._waiting, strict=True)
        ]
        if not any(plan.rows for plan in plans):
            return
        padded_tokens = padded_size(max(plan.num_tokens for plan in plans))
        plans = [self._for_rank(rank, plan, padded_tokens) for rank, plan in enumerate(plans)]
        ranks = zip(self.pipelines, plans, strict=True)
        running = [self._pool.submit(pipeline.forward, plan) for pipeline, plan in ranks]
        for pipeline, plan, result in zip(self.pipelines, plans, running, strict=True):
            pipeline.apply(plan, result.result())

    def _for_rank(self, rank: int, plan: StepPlan, padded_tokens: int) -> StepPlan:
        is_idle = not plan.rows
        self.idle_plans[rank] += is_idle
        return msgspec.structs.replace(plan, padded_tokens=padded_tokens, dummy=is_idle)


def build_expert_ranks(
    model_dir: Path,
    stage_count: int,
    size: int,
    *,
    slots_per_cohort: int,
    slot_tokens: int,
    chunk_tokens: int,
    dtype: torch.dtype = torch.float32,
    ends_of_stage: Callable[[int], Sequence[RankGroup]] = lambda size: ThreadRanks(size).ranks,
    builder_of: Callable[[RankGroup], ModelBuilder] = lambda end: partial(build_any_stage_model, experts=end),
) -> ExpertRanks:
    """Load every stage of a model once for each of `size` ranks. `ends_of_stage` makes a stage's exchanges, and
    `builder_of` what a rank builds its part with; on the CPU, if it isn't told otherwise.
    """
    ends = [ends_of_stage(size) for _ in range(stage_count)]
    stages_of_rank = [
        build_stages(
            model_dir,
            stage_count,
            dtype=dtype,
            slots_per_cohort=slots_per_cohort,
            slot_tokens=slot_tokens,
            build_model=_builder_of([builder_of(of_stage[rank]) for of_stage in ends]),
        )
        for rank in range(size)
    ]
    return ExpertRanks(stages_of_rank, slots_per_cohort=slots_per_cohort, chunk_tokens=chunk_tokens)


def _builder_of(builders: list[ModelBuilder]) -> ModelBuilder:
    """A builder that is called for one stage after the other, each of which has its own of `builders`."""
    following = iter(builders)

    def build(model_dir: Path, config: ModelConfig, shape: StageShape, progress: LoadProgress) -> StageModel:
        return next(following)(model_dir, config, shape, progress)

    return build
