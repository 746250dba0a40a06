"""Makes a stage's runner from the engine's welcome: fetch its own weight files, load, capture graphs, meet the peers.

The cut is known with the welcome, so fetching is a part of loading where preparation left the weights to the stages: it
is told in the status of phase `Loading`. A stage whose files are in the cache makes no request. No receive is
outstanding while loading or capturing. On a device the runner's state changes are recorded as events, and a plan is in
flight until the device has done it; on the CPU a plan is done when it returns.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_api.resource.model_source import HubSource, parse_source
from stageline_api.runtime_config import LayerRange, RuntimeConfig
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract
from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError, read_model_config
from stageline_runtime.models.families import build_any_stage_model, device_builder
from stageline_runtime.models.protocol import (
    CapturesGraphs,
    CaptureSizes,
    GraphsUnavailableError,
    ModelBuilder,
    StageModel,
    StageShape,
)
from stageline_runtime.models.weights.checkpoint import files_of_tensors
from stageline_runtime.models.weights.stage_weights import checkpoint_form, stage_tensor_shapes
from stageline_runtime.plan_bus.messages import GraphMode, Welcome
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, decode_sizes, padded_size
from stageline_runtime.planning.memory import mebibytes
from stageline_runtime.planning.this_machine import stage_threads
from stageline_runtime.prepare.cache import missing_shards
from stageline_runtime.stage.failures import allocation_failure
from stageline_runtime.stage.step.in_flight import DeviceMarks, InFlight
from stageline_runtime.stage.step.runner import StageRunner
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.stage.telemetry.watchdog import Watchdog
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, LoopbackTransport, Transport, WireSizes

if TYPE_CHECKING:
    from stageline_runtime.prepare.progress import AdvanceTo

logger = logging.getLogger(__name__)


def ensure_own_shards(
    source: str, model_dir: Path, config: ModelConfig, shape: StageShape, progress: StageProgress
) -> None:
    """Have every file in `model_dir` that holds a tensor of the stage of `shape`; `source` is the model's.

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

        fetch_shards(model_dir, names, LoadReporter(progress))
        progress.enter(Phase.LOADING)


def _own_tensors(model_dir: Path, config: ModelConfig, shape: StageShape) -> Collection[str]:
    if config.is_covered:
        from stageline_runtime.models.coverage.cut import held_tensors  # the coverage path is an extra

        return held_tensors(model_dir, shape.layers, is_first=shape.is_first, is_last=shape.is_last)
    form = checkpoint_form(model_dir)
    return stage_tensor_shapes(config, shape.layers, form, has_embedding=shape.is_first, has_head=shape.is_last)


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


def capture(model: StageModel, config: RuntimeConfig, welcome: Welcome, progress: StageProgress) -> str:
    """Capture what the group's plans will need; returns a sentence that says what runs captured.

    Raises:
        RuntimeFailure: class BadConfig, when graphs were asked for that this model or machine can't have.
    """
    graphs = welcome.graphs
    if graphs is GraphMode.OFF:
        account = f"graphs are off (spec.engine.graphs {config.graphs})"
        logger.info(account)
        return account
    sizes = CaptureSizes(decode=decode_sizes(welcome.slots_per_cohort), step=(padded_size(welcome.max_step_tokens),))
    try:
        if not isinstance(model, CapturesGraphs):
            raise GraphsUnavailableError("this model's layers can't be captured")
        report = model.capture_graphs(
            graphs, sizes, Path(config.cache_dir), lambda message: progress.enter(Phase.LOADING, message)
        )
    except GraphsUnavailableError as error:
        detail = f"spec.engine.graphs {config.graphs} can't be had: {error}; set it to off or auto"
        raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="capture graphs") from error
    progress.memory_bytes += report.memory_bytes
    mebibytes = report.memory_bytes >> 20
    account = f"{report.graphs} graphs captured ({graphs}) in {report.seconds:.1f} s, {mebibytes} MiB"
    logger.info(account)
    return account


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    runner: StageRunner
    transport: Transport
    in_flight: InFlight | None
    """On a device: the plans it still works on."""


class StageLoader:
    """Loads one stage and connects it. `build_model` None takes what the device asks for."""

    def __init__(
        self,
        contract: PodContract,
        progress: StageProgress,
        watchdog: Watchdog,
        accelerator: Accelerator | None,
        build_model: ModelBuilder | None,
    ) -> None:
        self._contract = contract
        self._progress = progress
        self._watchdog = watchdog
        self._accelerator = accelerator
        self._build_model = build_model

    def load(self, welcome: Welcome) -> LoadedStage:
        """Load, capture, then meet the peers; raises RuntimeFailure of the class of what prevents it."""
        contract = self._contract
        config = self._read_config(welcome)
        dtype = DTYPES[welcome.dtype]
        torch.set_num_threads(stage_threads(welcome.stages_on_host, welcome.stages_in_container))
        model = self._load_model(welcome, config, dtype)
        self._describe(welcome, config, dtype)
        captured = capture(model, contract.config, welcome, self._progress)
        self._progress.enter(Phase.RENDEZVOUS, f"at {contract.master_addr}:{contract.master_port}")
        transport = self._join(welcome, config.hidden_size, dtype)
        self._progress.enter(Phase.WARMING, captured)
        marks, in_flight = self._observers()
        runner = StageRunner(
            model,
            transport,
            self._progress.clock if marks is None else marks,
            self._watchdog if marks is None else marks,
            stage=contract.stage,
            stage_count=contract.stage_count,
            num_slots=welcome.num_cohorts * welcome.slots_per_cohort,
            hidden_size=config.hidden_size,
            dtype=dtype,
            guides=self._guides(Path(welcome.model_dir), config),
            accelerator=self._accelerator,
        )
        return LoadedStage(runner=runner, transport=transport, in_flight=in_flight)

    def _read_config(self, welcome: Welcome) -> ModelConfig:
        try:
            return read_model_config(Path(welcome.model_dir))
        except UnsupportedModelError as error:
            raise RuntimeFailure(FailureClass.MODEL_LOAD, str(error), operation="read the config") from error

    def _describe(self, welcome: Welcome, config: ModelConfig, dtype: torch.dtype) -> None:
        self._progress.hidden_token_bytes = config.hidden_size * dtype.itemsize
        self._progress.feedback_row_bytes = FEEDBACK_WIDTH * torch.int64.itemsize
        self._progress.num_slots = welcome.num_cohorts * welcome.slots_per_cohort
        self._progress.kv_capacity_tokens = welcome.num_blocks * BLOCK_TOKENS

    def _observers(self) -> tuple[DeviceMarks | None, InFlight | None]:
        if self._accelerator is None:
            return None, None
        marks = DeviceMarks(self._accelerator.main, self._watchdog)
        return marks, InFlight(self._accelerator, self._progress.clock, self._watchdog, marks)

    def _guides(self, model_dir: Path, config: ModelConfig) -> GuideMaker | None:
        """What guided decoding needs, on the stage that samples."""
        if self._contract.stage != self._contract.stage_count - 1:
            return None
        return GuideMaker(JsonGrammars(model_dir, config.vocab_size, config.eos_token_ids))

    def _load_model(self, welcome: Welcome, config: ModelConfig, dtype: torch.dtype) -> StageModel:
        layers = LayerRange(first=welcome.first_layer, last=welcome.last_layer)
        self._progress.layers = layers
        self._progress.enter(Phase.LOADING)
        shape = StageShape(
            layers=layers,
            is_first=self._contract.stage == 0,
            is_last=self._contract.stage == self._contract.stage_count - 1,
            dtype=dtype,
            num_cohorts=welcome.num_cohorts,
            slots_per_cohort=welcome.slots_per_cohort,
            slot_tokens=welcome.slot_tokens,
            num_blocks=welcome.num_blocks,
            max_step_tokens=padded_size(welcome.max_step_tokens),
        )
        if self._build_model is None:
            source = self._contract.config.source
            ensure_own_shards(source, Path(welcome.model_dir), config, shape, self._progress)
        try:
            model = self._builder()(Path(welcome.model_dir), config, shape, self._progress.loading)
        except RuntimeError as error:
            raise allocation_failure(error) from error
        kv_bytes = shape.num_blocks * BLOCK_TOKENS * config.kv_bytes_per_token(layers.count, dtype.itemsize)
        self._progress.memory_bytes = self._progress.total_bytes + kv_bytes
        if self._accelerator is not None:
            self._progress.memory_bytes = self._accelerator.allocated_bytes()
        return model

    def _builder(self) -> ModelBuilder:
        if self._build_model is not None:
            return self._build_model
        if self._accelerator is None:
            return build_any_stage_model
        return device_builder(self._accelerator)

    def _join(self, welcome: Welcome, hidden_size: int, dtype: torch.dtype) -> Transport:
        if self._contract.stage_count == 1:
            return LoopbackTransport()
        from stageline_runtime.transport.rendezvous import join  # torch.distributed costs time a lone stage can save

        sizes = WireSizes(
            hidden_size=hidden_size,
            dtype=dtype,
            max_step_tokens=padded_size(welcome.max_step_tokens),
            # Not a cohort's slots: last chunks of other cohorts' prompts are sampled in the same plan.
            max_rows=welcome.num_cohorts * welcome.slots_per_cohort,
        )
        return join(self._contract, welcome.transport, sizes, accelerator=self._accelerator)
