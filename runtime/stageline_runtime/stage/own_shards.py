"""The weight files that a stage itself fetches: those that hold its layers, where preparation left them to the stages.

The cut is known with the welcome, so this is a part of loading, and reported in the status of phase `Loading`. A stage
with all its files in the cache makes no request.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stageline_api.health import Phase
from stageline_api.resource.serving.model_source import HubSource, parse_source
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.models.weights.checkpoint import files_of_tensors
from stageline_runtime.models.weights.stage_weights import checkpoint_form, stage_tensors
from stageline_runtime.planning.memory import mebibytes
from stageline_runtime.prepare.cache import missing_shards
from stageline_runtime.stage.telemetry.progress import StageProgress

if TYPE_CHECKING:
    from stageline_runtime.prepare.progress import AdvanceTo

logger = logging.getLogger(__name__)


def ensure_own_shards(
    source: str,
    model_dir: Path,
    config: ModelConfig,
    shape: StageShape,
    progress: StageProgress,
    cache_limit_bytes: int | None = None,
) -> None:
    """Fetch every missing file in `model_dir` that holds a tensor of the stage of `shape`; `source` is the model's.

    `cache_limit_bytes` is the cache's limit, where unused models may be evicted.

    Raises:
        PrepareError: a file can't be fetched or stored; the message names it.
        WeightsError: the index lacks a tensor of the stage.
        CoverageError: the model can't be built or cut.
    """
    if not isinstance(parse_source(source), HubSource) or not missing_shards(model_dir):
        return
    names = [path.name for path in files_of_tensors(model_dir, _own_tensors(model_dir, config, shape))]
    if missing_shards(model_dir, names):
        from stageline_runtime.prepare.shards import fetch_shards  # a stage that fetches nothing needs no Hub client

        fetch_shards(model_dir, names, LoadReporter(progress), cache_limit_bytes)
        progress.enter(Phase.LOADING)


def _own_tensors(model_dir: Path, config: ModelConfig, shape: StageShape) -> Collection[str]:
    if config.is_covered:
        from stageline_runtime.models.coverage.cut import held_tensors  # the coverage path is an extra

        return held_tensors(model_dir, shape.layers, is_first=shape.is_first, is_last=shape.is_last)
    form = checkpoint_form(model_dir)
    return stage_tensors(config, shape.layers, form, has_embedding=shape.is_first, has_head=shape.is_last)


class LoadReporter:
    """A `Reporter` into the stage's status; the log gets a line where something begins or ends."""

    def __init__(self, progress: StageProgress) -> None:
        self._progress = progress

    def note(self, line: str) -> None:
        logger.info(line)
        self._progress.enter(Phase.LOADING, line)

    @contextmanager
    def task(self, title: str, total_bytes: int | None) -> Iterator["AdvanceTo"]:
        self.note(title)

        def advance_to(done_bytes: int, new_total_bytes: int | None = None, /) -> None:
            total = new_total_bytes or total_bytes
            of_total = "" if total is None else f" of {mebibytes(total)}"
            self._progress.enter(Phase.LOADING, f"{title}: {done_bytes >> 20}{of_total} MiB")

        yield advance_to
        logger.info("%s: done", title)
