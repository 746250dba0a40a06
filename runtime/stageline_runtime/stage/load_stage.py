"""Makes a stage's runner from the engine's welcome: fetch its own weight files, load, measure, agree on the cache,
capture graphs, meet the peers.

On devices the cache is made for what all stages measured, so it comes after the weights and before the graphs, which
read it. No receive is outstanding while loading or capturing. On a device the runner's state changes are recorded as
events, and a plan is in flight until the device has done it; on the CPU a plan is done when it returns.
"""

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_api.runtime_config import LayerRange
from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract
from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError, read_model_config
from stageline_runtime.model_facts.rank_cut import part_of_layers
from stageline_runtime.models.decoder import DecoderStage
from stageline_runtime.models.families import build_any_stage_model, device_builder
from stageline_runtime.models.layers.attention import Attention, AttentionHeads
from stageline_runtime.models.protocol import ModelBuilder, StageModel, StageShape
from stageline_runtime.plan_bus.messages import CacheSized, GraphMode, Shutdown, Welcome
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, padded_size
from stageline_runtime.planning.memory import link_ring_bytes, report_rows
from stageline_runtime.planning.this_machine import stage_threads
from stageline_runtime.ranks.stage_ranks import StageRanks
from stageline_runtime.stage.capturing import capture, capture_draft
from stageline_runtime.stage.failures import allocation_failure
from stageline_runtime.stage.load_draft import LoadedDraft, load_draft
from stageline_runtime.stage.memory_use import MemoryUse, blocks_to_measure, measure
from stageline_runtime.stage.own_shards import ensure_own_shards
from stageline_runtime.stage.step.in_flight import DeviceMarks, InFlight
from stageline_runtime.stage.step.runner import StageRunner
from stageline_runtime.stage.telemetry.progress import KvOccupancy, StageProgress
from stageline_runtime.stage.telemetry.watchdog import Watchdog
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, LoopbackTransport, Transport, WireSizes
from stageline_runtime.transport.rendezvous import RankLane, join

logger = logging.getLogger(__name__)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    runner: StageRunner
    transport: Transport
    in_flight: InFlight | None
    """On a device: the plans it still works on."""


AgreeOnCache = Callable[[MemoryUse | None], CacheSized | Shutdown]
"""Sends the measured memory to the engine, None on a CPU; returns the cache's size, or that the group ends."""


class StageLoader:
    """Loads one stage and connects it. `build_model` None takes what the device asks for."""

    def __init__(
        self,
        contract: PodContract,
        progress: StageProgress,
        watchdog: Watchdog,
        accelerator: Accelerator | None,
        build_model: ModelBuilder | None,
        ranks: StageRanks,
        attention: Callable[[AttentionHeads], Attention] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """`attention`: on a device; None takes the Triton kernels. `listener`: where the stage before connects to; None
        where this stage is the only one."""
        self._contract = contract
        self._progress = progress
        self._watchdog = watchdog
        self._accelerator = accelerator
        self._build_model = build_model
        self._ranks = ranks
        self._attention = attention
        self._listener = listener

    def load(self, welcome: Welcome, agree_on_cache: AgreeOnCache) -> LoadedStage | Shutdown:
        """Load, agree on the cache, capture, then meet the peers. `Shutdown`: the group ended during loading.

        Raises:
            RuntimeFailure: of the class of its cause.
        """
        contract = self._contract
        config = self._read_config(Path(welcome.model_dir))
        dtype = DTYPES[welcome.dtype]
        torch.set_num_threads(stage_threads(welcome.stages_on_host, welcome.stages_in_container))
        shape = self._shape(welcome, dtype)
        model = self._load_model(welcome, config, shape)
        drafts = welcome.draft_dir and self._ranks.samples
        draft = self._load_draft(welcome, config, shape) if drafts else None
        self._describe(welcome, config, dtype)
        if isinstance(model, DecoderStage):
            self._progress.lacks_native_kernels = model.lacks_native_kernels
        sized = agree_on_cache(self._measure(model, config, shape, welcome.graphs, draft))
        if isinstance(sized, Shutdown):
            return sized
        self._make_cache(model, config, shape, sized, draft)
        captured = capture(model, contract.config, welcome, self._progress)
        drafter = None
        if draft is not None:
            draft_graphs, account = capture_draft(draft, welcome, self._progress)
            captured, drafter = f"{captured}{account}", draft.drafter(draft_graphs)
        self._progress.enter(Phase.RENDEZVOUS, "with the other stages")
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
            num_slots=welcome.num_slots,
            hidden_size=config.hidden_size,
            dtype=dtype,
            guides=self._guides(Path(welcome.model_dir), config),
            device=self._accelerator or HOST,
            drafter=drafter,
            ranks=self._ranks.tensor,
            report_rows=report_rows(config.vocab_size),
            vocab_size=config.vocab_size if self._accelerator is None else 0,
        )
        return LoadedStage(runner=runner, transport=transport, in_flight=in_flight)

    def _load_draft(self, welcome: Welcome, config: ModelConfig, shape: StageShape) -> LoadedDraft:
        """The draft model, whole, with a slot for each of the group's."""
        draft_dir = Path(welcome.draft_dir)
        draft = self._read_config(draft_dir)
        self._progress.enter(Phase.LOADING, "the draft model")
        target_bytes = self._progress.total_bytes

        def loading(loaded_bytes: int, total_bytes: int) -> None:
            self._progress.loading(target_bytes + loaded_bytes, target_bytes + total_bytes)

        try:
            return load_draft(
                draft_dir,
                draft,
                config,
                shape,
                loading,
                max_step_tokens=welcome.max_step_tokens,
                accelerator=self._accelerator,
                attention=self._attention,
            )
        except RuntimeError as error:
            raise allocation_failure(error) from error

    @property
    def _most_drafts(self) -> int:
        """Of a row."""
        drafting = self._contract.config.speculative
        return 0 if drafting is None else drafting.tokens

    def _read_config(self, model_dir: Path) -> ModelConfig:
        try:
            return read_model_config(model_dir)
        except UnsupportedModelError as error:
            raise RuntimeFailure(FailureClass.MODEL_LOAD, str(error), operation="read the config") from error

    def _describe(self, welcome: Welcome, config: ModelConfig, dtype: torch.dtype) -> None:
        self._progress.hidden_token_bytes = self._ranks.experts.size * config.hidden_size * dtype.itemsize
        self._progress.feedback_row_bytes = FEEDBACK_WIDTH * torch.int64.itemsize
        self._progress.num_slots = welcome.num_slots
        self._progress.occupancy = KvOccupancy(self._ranks.experts.size)

    def _observers(self) -> tuple[DeviceMarks | None, InFlight | None]:
        if self._accelerator is None:
            return None, None
        marks = DeviceMarks(self._accelerator.main, self._watchdog)
        return marks, InFlight(self._accelerator, self._progress.clock, self._watchdog, marks)

    def _guides(self, model_dir: Path, config: ModelConfig) -> GuideMaker | None:
        """What guided decoding needs, on the rank that samples."""
        if self._contract.stage != self._contract.stage_count - 1 or not self._ranks.samples:
            return None
        return GuideMaker(JsonGrammars(model_dir, config.vocab_size, config.eos_token_ids))

    def _shape(self, welcome: Welcome, dtype: torch.dtype) -> StageShape:
        """With a cache that suffices to measure the stage."""
        shape = StageShape(
            layers=LayerRange(first=welcome.first_layer, last=welcome.last_layer),
            is_first=self._contract.stage == 0,
            is_last=self._contract.stage == self._contract.stage_count - 1,
            dtype=dtype,
            num_cohorts=welcome.num_cohorts,
            num_slots=welcome.num_slots,
            slot_tokens=welcome.slot_tokens,
            max_step_tokens=padded_size(welcome.max_step_tokens),
        )
        return replace(shape, num_blocks=blocks_to_measure(shape))

    def _load_model(self, welcome: Welcome, config: ModelConfig, shape: StageShape) -> StageModel:
        self._progress.layers = shape.layers
        self._progress.enter(Phase.LOADING)
        if self._build_model is None:
            given = self._contract.config
            model_dir = Path(welcome.model_dir)
            ensure_own_shards(given.source, model_dir, config, shape, self._progress, given.cache_limit_bytes)
        try:
            return self._builder()(Path(welcome.model_dir), config, shape, self._progress.loading)
        except RuntimeError as error:
            raise allocation_failure(error) from error

    def _measure(
        self,
        model: StageModel,
        config: ModelConfig,
        shape: StageShape,
        graphs: GraphMode,
        draft: LoadedDraft | None,
    ) -> MemoryUse | None:
        if self._accelerator is None:
            return None
        self._progress.enter(Phase.LOADING, "measuring the largest step")
        self._ranks.await_all("measure the largest step")
        try:
            use = measure(model, config, shape, graphs, self._accelerator, drafts=self._most_drafts, draft=draft)
        except torch.OutOfMemoryError as error:
            raise allocation_failure(error) from error
        finally:
            self._watchdog.rest()
        use = replace(use, step_bytes=use.step_bytes + self._link_bytes(config, shape))
        logger.info("loading took %d MiB, the largest step %d MiB", use.held_bytes >> 20, use.step_bytes >> 20)
        self._progress.enter(Phase.LOADING, "waiting for the other stages to load")
        return use

    def _link_bytes(self, config: ModelConfig, shape: StageShape) -> int:
        """What links to the neighbours take of the device; they are made after the cache."""
        hidden_bytes = shape.max_step_tokens * (config.hidden_size // self._ranks.tensor.size) * shape.dtype.itemsize
        return link_ring_bytes(hidden_bytes, shape.num_slots, is_first=shape.is_first, is_last=shape.is_last)

    def _make_cache(
        self, model: StageModel, config: ModelConfig, shape: StageShape, sized: CacheSized, draft: LoadedDraft | None
    ) -> None:
        try:
            model.reserve_cache(sized.num_blocks)
            draft_bytes = 0 if draft is None else draft.make_cache(sized.num_blocks)
        except RuntimeError as error:
            raise allocation_failure(error) from error
        kv_tokens = self._ranks.experts.size * sized.num_blocks * BLOCK_TOKENS
        self._progress.kv_capacity_tokens = kv_tokens
        part = part_of_layers(config, self._ranks.tensor.size)
        kv_bytes = kv_tokens * part.kv_bytes_per_token(shape.layers.count, shape.dtype.itemsize)
        kv_bytes //= self._ranks.experts.size  # what others hold of the cache is theirs to tell
        self._progress.memory_bytes = self._progress.total_bytes + kv_bytes + draft_bytes
        if self._accelerator is not None:
            self._progress.memory_bytes = self._accelerator.allocated_bytes()

    def _builder(self) -> ModelBuilder:
        if self._build_model is not None:
            return self._build_model
        if self._accelerator is None:
            return partial(build_any_stage_model, ranks=self._ranks.tensor, experts=self._ranks.experts)
        ranks, experts = self._ranks.tensor, self._ranks.experts
        return device_builder(self._accelerator, self._attention, ranks, experts=experts)

    def _join(self, welcome: Welcome, hidden_size: int, dtype: torch.dtype) -> Transport:
        if self._listener is None:
            return LoopbackTransport()
        sizes = WireSizes(
            hidden_size=hidden_size // self._ranks.tensor.size,
            dtype=dtype,
            max_step_tokens=padded_size(welcome.max_step_tokens),
            # Not a cohort's slots: last chunks of other cohorts' prompts are sampled in the same plan.
            max_rows=welcome.num_slots,
        )
        lane = join(
            self._contract,
            welcome.transport,
            sizes,
            accelerator=self._accelerator,
            listener=self._listener,
            next_address=welcome.next_address,
        )
        return lane if self._ranks.tensor.size == 1 else RankLane(lane, self._ranks.tensor)
