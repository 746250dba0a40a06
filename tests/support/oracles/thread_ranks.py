"""The ranks of a stage as threads of this process: their exchanges, and a stage's model that runs all of them at once.

What every rank computes is compared at each call, so that ranks that drift apart are seen where it begins.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.families import build_any_stage_model
from stageline_runtime.models.protocol import LoadProgress, ModelBuilder, StageModel, StageShape
from stageline_runtime.ranks.protocol import RankGroup

LONGEST_WAIT_SECONDS = 60.0


class ThreadRanks:
    """What the ranks share; `operations` lists the names that rank 0 gave."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LONGEST_WAIT_SECONDS)
        self.given: list[tuple[str, Tensor]] = [("", torch.empty(0))] * size
        self.operations: list[str] = []

    @property
    def ranks(self) -> list["ThreadRank"]:
        return [ThreadRank(rank, self) for rank in range(len(self.given))]


class ThreadRank:
    def __init__(self, rank: int, shared: ThreadRanks) -> None:
        self.rank, self.size = rank, len(shared.given)
        self._shared = shared

    def all_reduce(self, rows: Tensor, operation: str, /) -> Tensor:
        total = self.all_gather(rows, operation).float().sum(0)
        return total.to(rows.dtype)

    def all_gather(self, rows: Tensor, operation: str, /) -> Tensor:
        self._shared.given[self.rank] = operation, rows
        if self.rank == 0:
            self._shared.operations.append(operation)
        self._shared.barrier.wait()
        assert len({(name, given.shape) for name, given in self._shared.given}) == 1, self._shared.given
        gathered = torch.stack([given for _, given in self._shared.given])
        self._shared.barrier.wait()
        return gathered

    def reduce_scatter(self, rows: Tensor, operation: str, /) -> Tensor:
        return self.all_reduce(rows, operation)[self.rank]

    def close(self) -> None:
        pass


class RankedStage:
    """All ranks of one stage behind the face of one model."""

    def __init__(self, models: list[StageModel], pool: ThreadPoolExecutor) -> None:
        self.models = models
        self._pool = pool

    def step_batch(self, plan: Any) -> Any:
        return self.models[0].step_batch(plan)

    def reserve_cache(self, num_blocks: int) -> None:
        self._each(lambda model: model.reserve_cache(num_blocks))

    def change_tables(self, changes: Any) -> None:
        self._each(lambda model: model.change_tables(changes))

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._same(lambda model: model.embed(token_ids))

    def layers(self, hidden: Tensor, batch: Any) -> Tensor:
        return self._same(lambda model: model.layers(hidden.clone(), batch))

    def head(self, hidden_rows: Tensor) -> Tensor:
        return self._same(lambda model: model.head(hidden_rows))

    def start(self, call: Callable[[StageModel], Any]) -> list[Future[Any]]:
        """Let each rank's thread run `call` on its model; what each gives, in the order of the ranks."""
        return [self._pool.submit(call, model) for model in self.models]

    def _each(self, call: Callable[[StageModel], Any]) -> list[Any]:
        return [future.result() for future in self.start(call)]

    def _same(self, call: Callable[[StageModel], Tensor]) -> Tensor:
        results: list[Tensor] = self._each(call)
        assert all(torch.equal(results[0], result) for result in results), "the ranks don't hold the same bits"
        return results[0]


def build_ranks(
    model_dir: Path,
    config: ModelConfig,
    shape: StageShape,
    ranks: list[ThreadRank],
    progress: LoadProgress,
    builder_of: Callable[[RankGroup], ModelBuilder] = lambda ranks: partial(build_any_stage_model, ranks=ranks),
) -> RankedStage:
    """Build each rank's part of a stage."""
    models = [builder_of(rank)(model_dir, config, shape, progress) for rank in ranks]
    return RankedStage(models, ThreadPoolExecutor(len(ranks), initializer=torch.set_num_threads, initargs=(1,)))


def builder_of_ranks(size: int, builder_of: Callable[[RankGroup], ModelBuilder] | None = None) -> ModelBuilder:
    """A builder of stages of `size` ranks, each made by what `builder_of` gives for it; None: on the CPU."""

    def build(model_dir: Path, config: ModelConfig, shape: StageShape, progress: LoadProgress) -> StageModel:
        ranks = ThreadRanks(size).ranks
        if builder_of is None:
            return build_ranks(model_dir, config, shape, ranks, progress)
        return build_ranks(model_dir, config, shape, ranks, progress, builder_of)

    return build
