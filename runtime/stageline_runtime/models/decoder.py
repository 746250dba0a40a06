"""The own decoder, cut to one stage: all families of the registry as one parameterised implementation, on the CPU or on
a device.

Differences between families (norms, biases, windows, mixtures of experts, head size, tied head, rotary scaling) follow
from `ModelConfig` and from which weights exist. Numerics follow Hugging Face's implementation operation by operation,
so that float32 runs give the same greedy tokens. The residual stream is the only tensor between layers and between
stages.

On a device no call waits for it, except for experts where torch has no grouped product of their dtype
(`grouped_experts`). Weights and tables are allocated at load. The cache is allocated again once its size is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.device.attention import TritonAttention
from stageline_runtime.models.device.graphs import DeviceGraphs, step_sizes
from stageline_runtime.models.device.grouped_experts import GroupedExperts
from stageline_runtime.models.device.row_operators import TritonRows
from stageline_runtime.models.layers.attention import Attention, AttentionHeads, NativeAttention, RowAttention
from stageline_runtime.models.layers.decoder_layer import (
    DecoderLayers,
    LayerParts,
    TurnHeads,
    norm_alone,
    norm_and_rotate,
)
from stageline_runtime.models.layers.feed_forward import ExpertLoop, RunExperts
from stageline_runtime.models.layers.kv_cache import make_cache
from stageline_runtime.models.layers.row_modules import OutputHead, RowOperators
from stageline_runtime.models.layers.step_batch import BatchBounds, BlockTable, StepBatch, StepTable, build_step_batch
from stageline_runtime.models.protocol import (
    CPU,
    CaptureProgress,
    CaptureReport,
    CaptureSizes,
    GraphsUnavailableError,
    LoadProgress,
    StageShape,
)
from stageline_runtime.models.rotary import RotaryTable
from stageline_runtime.models.weights.stage_weights import StageWeights
from stageline_runtime.native.attention_kernel import HeadShape
from stageline_runtime.native.row_kernels import kernels_if_possible
from stageline_runtime.plan_bus.messages import GraphMode, SlotBlocks, StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.ranks.stage_ranks import StageRanks


@dataclass(frozen=True, slots=True)
class Operators:
    """What computes a stage's layers beside matrix products."""

    attention: Attention
    rows: RowOperators | None
    turn: TurnHeads
    run_experts: RunExperts = ExpertLoop
    lacks_native_kernels: bool = False
    """Whether torch's own operators do what compiled kernels would on a CPU."""


def cpu_operators(heads: AttentionHeads, dtype: torch.dtype, slot_tokens: int) -> Operators:
    """The compiled kernels, or torch's operators where they can't be had."""
    kernels = kernels_if_possible(
        HeadShape(
            num_kv_heads=heads.num_kv_heads,
            group_size=heads.group_size,
            head_dim=heads.head_dim,
            slot_tokens=slot_tokens,
            dtype=dtype,
        )
    )
    if kernels is None:
        return Operators(RowAttention(heads), None, norm_and_rotate, lacks_native_kernels=True)
    return Operators(NativeAttention(kernels.attention, heads), kernels.rows, norm_alone)


def device_operators(
    heads: AttentionHeads, accelerator: Accelerator, attention: Attention | None, has_row_kernels: bool | None
) -> Operators:
    """Triton's kernels, or the given `attention`. `has_row_kernels` None: the kernels on rows run beside Triton's."""
    chosen = TritonAttention(heads, accelerator.num_processors) if attention is None else attention
    if has_row_kernels is None:
        has_row_kernels = attention is None
    rows = TritonRows() if has_row_kernels else None
    return Operators(chosen, rows, norm_and_rotate if rows is None else rows.rotate, GroupedExperts)


class DecoderStage:
    """Layers `first..last` of a decoder with their KV cache; the first stage embeds, the last has the head.

    `config`, weights and cache are those of this rank's part, where the stage has several.
    """

    def __init__(
        self,
        config: ModelConfig,
        shape: StageShape,
        weights: StageWeights,
        operators: Operators,
        ranks: StageRanks,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.lacks_native_kernels = operators.lacks_native_kernels
        self._config = config
        self._shape = shape
        self._accelerator = accelerator
        self._device = CPU if accelerator is None else accelerator.device
        self._num_ranks = ranks.of_stage.size
        self._operators = operators
        self._embedding = weights.embedding() if shape.is_first else None
        self._parts = tuple(
            LayerParts(
                config,
                layer,
                operators.rows,
                ranks.sums(shape.layers.first + index),
                ranks.exchange(shape.layers.first + index),
                operators.run_experts,
                operators.turn,
            )
            for index, layer in enumerate(weights.layers())
        )
        self._head = (
            OutputHead(config, weights, self._embedding, operators.rows, ranks.tensor) if shape.is_last else None
        )
        self._rotary = RotaryTable(config, shape.slot_tokens, shape.dtype, self._device)
        self._bounds = BatchBounds(
            num_slots=shape.num_slots, slot_tokens=shape.slot_tokens, tiling=operators.attention.tiling
        )
        self._graphs: DeviceGraphs | None = None
        self._make_cache(shape.num_blocks or shape.num_slots * blocks_of(shape.slot_tokens))

    def _make_cache(self, num_blocks: int) -> None:
        shape = self._shape
        self._blocks = BlockTable(
            num_slots=shape.num_slots,
            slot_tokens=shape.slot_tokens,
            num_blocks=num_blocks,
            device=self._accelerator or HOST,
        )
        caches = make_cache(self._config, shape, num_blocks, self._device)
        windows = layer_windows(self._config, shape)
        self._layers = DecoderLayers(self._parts, caches, windows, self._operators.attention, self._rotary)
        self._table = StepTable(shape.max_step_tokens, self._blocks, self._accelerator or HOST)

    def reserve_cache(self, num_blocks: int) -> None:
        """Reallocate the cache with `num_blocks` blocks; its contents are lost."""
        assert self._graphs is None, "captured graphs read the cache that is to be replaced"
        del self._layers  # first, so that the old cache and the new one are never held at once
        self._make_cache(num_blocks)

    @torch.inference_mode()
    def change_tables(self, changes: Sequence[SlotBlocks]) -> None:
        """Apply what a plan says of the slots' blocks."""
        self._blocks.change(changes)

    def step_batch(self, plan: StepPlan) -> StepBatch:
        """The plan's table, on the host; raises BusProtocolError where a row lies outside its slot."""
        batch = build_step_batch(plan.rows, plan.padded_tokens, self._bounds, plan.graph_mode)
        self._blocks.check(plan.rows)
        return batch

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile a device's attention kernels for every way that plans will ask for, and those on rows, while no peer
        waits.

        The latter depend on no number of rows, so one row compiles them; the head's norm is that of the layers.
        """
        config, dtype, device = self._config, self._shape.dtype, self._device
        for size in step_sizes(self._shape.max_step_tokens, smallest=1):
            step = self._table.fill(self._padding(size).with_padding_tile())
            num_heads = config.num_heads + config.num_kv_heads
            heads = torch.zeros(size, num_heads + config.num_kv_heads, config.head_dim, dtype=dtype, device=device)
            self._layers.attend(0, (heads[:, :num_heads], heads[:, num_heads:]), self._layers.rotary(step), step)
        step = self._table.fill(self._padding(1))
        self._layers.warm_up_parts(torch.zeros(1, config.hidden_size, dtype=dtype, device=device), step)
        if self._accelerator is not None:
            self._accelerator.synchronize()

    def _padding(self, num_tokens: int) -> StepBatch:
        return StepBatch.padding(num_tokens, GraphMode.OFF, self._bounds)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._embedding is not None, "this stage holds no embedding"
        return F.embedding(token_ids, self._embedding)

    @torch.inference_mode()
    def layers(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        if batch.graph_mode is GraphMode.OFF:
            return self._layers(hidden, self._table.fill(batch))
        assert self._graphs is not None, f"a plan in mode {batch.graph_mode}, but nothing was captured"
        return self._graphs.run(hidden, batch)

    @torch.inference_mode()
    def capture_graphs(self, graphs: GraphMode, sizes: CaptureSizes, progress: CaptureProgress) -> CaptureReport:
        """Capture the layers for plans up to `graphs`; touches no slot.

        Raises:
            GraphsUnavailableError: a CPU, a mixture of experts that waits for the device, or several ranks.
        """
        device = self._accelerator
        if device is None:
            raise GraphsUnavailableError("nothing is captured on a CPU")
        if self._num_ranks > 1:
            raise GraphsUnavailableError(
                f"the stage's layers are cut over {self._num_ranks} ranks, whose exchanges can't be captured"
            )
        if self._config.mixture is not None and not device.queues_experts(self._shape.dtype):
            raise GraphsUnavailableError(
                "the model is a mixture of experts, whose products wait for the device here: they are captured in "
                f"bfloat16 on devices of sm_90 and sm_100, and this is {self._shape.dtype} on {device.identity()}"
            )
        self._graphs = DeviceGraphs(
            device,
            device.graph_recorder(),
            self._layers,
            self._table,
            bounds=self._bounds,
            hidden_size=self._config.hidden_size,
            max_tokens=self._shape.max_step_tokens,
            dtype=self._shape.dtype,
        )
        return self._graphs.capture(graphs, sizes, progress)

    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return self._held_head(hidden_rows)

    @property
    def _held_head(self) -> OutputHead:
        assert self._head is not None, "this stage holds no head"
        return self._head

    @property
    def first_token(self) -> int:
        return self._held_head.first_token

    def head_part(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return self._held_head.part(hidden_rows)

    def whole_head(self, part: torch.Tensor) -> torch.Tensor:
        return self._held_head.of_all(part)


def build_stage_model(
    model_dir: Path,
    config: ModelConfig,
    shape: StageShape,
    progress: LoadProgress,
    ranks: RankGroup | None = None,
    *,
    experts: RankGroup | None = None,
    accelerator: Accelerator | None = None,
    attention: Attention | None = None,
    has_row_kernels: bool | None = None,
) -> DecoderStage:
    """Load a stage's weights and reserve its KV cache: with `ranks`, the part of both that is this rank's; with
    `experts`, all but other ranks' experts. `config` is that of the whole model. On an `accelerator`, `attention` None
    takes the Triton kernels, and one that is given is made for the rank's heads; `has_row_kernels`: whether Triton's
    kernels on rows run too, None meaning where attention is Triton's.

    Raises:
        UnsupportedModelError: the model can't be cut over so many ranks, or both `ranks` and `experts` are several, or
            experts have sizes that no device runs.
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    of_stage = StageRanks.of(ranks, experts)
    cut = of_stage.cut(config)
    weights = StageWeights(model_dir, config, shape, progress, CPU if accelerator is None else accelerator.device, cut)
    config = cut.part
    heads = attention_heads(config)
    if accelerator is None:
        operators = cpu_operators(heads, shape.dtype, shape.slot_tokens)
        return DecoderStage(config, shape, weights, operators, of_stage)
    operators = device_operators(heads, accelerator, attention, has_row_kernels)
    stage = DecoderStage(config, shape, weights, operators, of_stage, accelerator)
    stage.warm_up()
    return stage


def attention_heads(config: ModelConfig) -> AttentionHeads:
    return AttentionHeads(num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)


def layer_windows(config: ModelConfig, shape: StageShape) -> tuple[int | None, ...]:
    """The attention window of each of the stage's layers; one that no position reaches past is none."""
    return tuple(
        window if window is not None and window < shape.slot_tokens else None
        for window in config.attention_windows[shape.layers.first : shape.layers.last + 1]
    )
