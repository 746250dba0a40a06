"""The own decoder on a device, cut to one stage. No call waits for the device, but for experts where torch has no
grouped product of their dtype there (`grouped_experts`).

Weights, cache and tables are made at load; the cache a second time, once it is known how much memory is left. What a
slot gives up needs no zeros: attention reads no position that the slot's present request hasn't written.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.graphs.device_graphs import DeviceGraphs, step_sizes
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.cpu.decoder import layer_windows
from stageline_runtime.models.cpu.row_modules import OutputHead
from stageline_runtime.models.device.attention import AttentionHeads, DeviceAttention, TritonAttention
from stageline_runtime.models.device.layers import DeviceLayerParts, DeviceLayers
from stageline_runtime.models.device.row_operators import TritonRows
from stageline_runtime.models.device.step_rows import BlockTables, CacheBounds, StepRows, StepTable, build_step_rows
from stageline_runtime.models.protocol import (
    CaptureProgress,
    CaptureReport,
    CaptureSizes,
    GraphsUnavailableError,
    LoadProgress,
    StageShape,
)
from stageline_runtime.models.rotary import RotaryTable
from stageline_runtime.models.weights.stage_weights import StageWeights
from stageline_runtime.plan_bus.messages import GraphMode, StepPlan
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.ranks.stage_ranks import StageRanks


class DeviceStage:
    """Layers `first..last` with their cache on `accelerator`; the first stage embeds, the last has the head."""

    def __init__(
        self,
        config: ModelConfig,
        shape: StageShape,
        weights: StageWeights,
        accelerator: Accelerator,
        attention: DeviceAttention,
        heads: AttentionHeads,
        ranks: StageRanks,
        rows: TritonRows | None,
    ) -> None:
        self._num_ranks = ranks.tensor.size
        self._config = config
        self._shape = shape
        self._heads = heads
        self._graphs: DeviceGraphs | None = None
        self._accelerator = accelerator
        self._embedding = weights.embedding() if shape.is_first else None
        self._parts = tuple(
            DeviceLayerParts(
                config,
                layer,
                rows,
                sums=ranks.sums(shape.layers.first + index),
                exchange=ranks.exchange(shape.layers.first + index),
            )
            for index, layer in enumerate(weights.layers())
        )
        self._attention = attention
        self._head = OutputHead(config, weights, self._embedding, rows, ranks.tensor) if shape.is_last else None
        self._rotary = RotaryTable(config, shape.slot_tokens, shape.dtype, accelerator.device)
        self._bounds = CacheBounds(
            num_slots=shape.num_slots, slot_tokens=shape.slot_tokens, tile_tokens=heads.prefill_tile_tokens
        )
        self._make_cache(shape.num_blocks or shape.num_slots * blocks_of(shape.slot_tokens))

    def _make_cache(self, num_blocks: int) -> None:
        shape, device = self._shape, self._accelerator.device
        self._blocks = BlockTables(num_slots=shape.num_slots, slot_tokens=shape.slot_tokens, num_blocks=num_blocks)
        self._caches = tuple(_cache(num_blocks, shape, self._heads, device) for _ in self._parts)
        windows = layer_windows(self._config, shape)
        self._layers = DeviceLayers(self._parts, self._caches, windows, self._attention, self._rotary)
        self._table = StepTable(self._accelerator, shape.max_step_tokens, self._blocks, shape.num_slots)

    def reserve_cache(self, num_blocks: int) -> None:
        """Make the cache anew, of `num_blocks` blocks; what it held is forgotten."""
        assert self._graphs is None, "captured graphs read the cache that is to be replaced"
        del self._layers, self._caches  # first, so that the old cache and the new one are never held at once
        self._make_cache(num_blocks)

    def attention_batch(self, plan: StepPlan) -> StepRows:
        """The plan's table, on the host; raises ValueError where a row lies outside the cache."""
        return build_step_rows(plan.rows, plan.padded_tokens, self._bounds, plan.graph_mode)

    def reset_slot(self, slot: int, keep_tokens: int = 0) -> None:
        self._blocks.trim(slot, keep_tokens)

    def trim_slot(self, slot: int, num_tokens: int) -> None:
        self._blocks.trim(slot, num_tokens)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the attention kernels for every way that plans will ask for, and those on rows, while no peer waits.

        The latter depend on no number of rows, so one row compiles them; the head's norm is that of the layers.
        """
        heads, dtype, device = self._heads, self._shape.dtype, self._accelerator.device
        for size in step_sizes(self._shape.max_step_tokens, smallest=1):
            rows = self._table.fill(StepRows.padding(size, GraphMode.OFF).with_padding_tile())
            query_key = torch.zeros(
                size, heads.num_heads + heads.num_kv_heads, heads.head_dim, dtype=dtype, device=device
            )
            value = torch.zeros(size, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=device)
            self._layers.warm_up((query_key, value), rows)
        padding = self._table.fill(StepRows.padding(1, GraphMode.OFF))
        hidden = torch.zeros(1, self._config.hidden_size, dtype=dtype, device=device)
        self._layers.warm_up_parts(hidden, padding)
        self._accelerator.synchronize()

    @torch.inference_mode()
    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        pairs = self._blocks.copy(source, target, num_tokens)
        if pairs:
            sources, targets = self._accelerator.place(torch.tensor(pairs, dtype=torch.int64)).unbind(1)
            for cache in self._caches:
                for part in cache:
                    part[targets] = part[sources]

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._embedding is not None, "this stage holds no embedding"
        return F.embedding(token_ids, self._embedding)

    @torch.inference_mode()
    def layers(self, hidden: torch.Tensor, batch: StepRows) -> torch.Tensor:
        if batch.graph_mode is GraphMode.OFF:
            return self._layers(hidden, self._table.fill(batch))
        assert self._graphs is not None, f"a plan in mode {batch.graph_mode}, but nothing was captured"
        return self._graphs.run(hidden, batch)

    @torch.inference_mode()
    def capture_graphs(
        self, graphs: GraphMode, sizes: CaptureSizes, _cache_dir: Path, progress: CaptureProgress
    ) -> CaptureReport:
        """Capture the layers for plans up to `graphs`; touches no slot.

        Raises:
            GraphsUnavailableError: a mixture of experts, whose products may wait for the device, or several ranks.
        """
        if self._num_ranks > 1:
            raise GraphsUnavailableError(
                f"the stage's layers are cut over {self._num_ranks} ranks, whose sums can't be captured"
            )
        if self._config.mixture is not None:
            raise GraphsUnavailableError("the model is a mixture of experts, whose products may wait for the device")
        self._graphs = DeviceGraphs(
            self._accelerator,
            self._accelerator.graph_recorder(),
            self._layers,
            self._table,
            hidden_size=self._config.hidden_size,
            max_tokens=self._shape.max_step_tokens,
            dtype=self._shape.dtype,
        )
        return self._graphs.capture(graphs, sizes, progress)

    @torch.inference_mode()
    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "this stage holds no head"
        return self._head(hidden_rows)


def build_device_stage(
    model_dir: Path,
    config: ModelConfig,
    shape: StageShape,
    progress: LoadProgress,
    accelerator: Accelerator,
    attention: DeviceAttention | None = None,
    ranks: RankGroup | None = None,
    *,
    experts: RankGroup | None = None,
    has_row_kernels: bool | None = None,
) -> DeviceStage:
    """Load a stage's weights, or its rank's part, to the device and reserve its cache there. `experts`: the ranks that
    the experts alone are cut over. `attention` None takes the Triton kernels; one that is given is made for the rank's
    heads. `has_row_kernels`: whether Triton's kernels on rows run too; None means where `attention` is Triton's.

    Raises:
        UnsupportedModelError: the model can't be cut over so many ranks, or both `ranks` and `experts` are several, or
            experts have sizes that no device runs.
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    of_stage = StageRanks.of(ranks, experts)
    cut = of_stage.cut(config)
    weights = StageWeights(model_dir, config, shape, progress, accelerator.device, cut)
    config = cut.part
    heads = attention_heads(config, shape)
    chosen = TritonAttention(heads, accelerator.num_processors) if attention is None else attention
    if has_row_kernels is None:
        has_row_kernels = attention is None
    rows = TritonRows() if has_row_kernels else None
    stage = DeviceStage(config, shape, weights, accelerator, chosen, heads, of_stage, rows)
    stage.warm_up()
    return stage


def attention_heads(config: ModelConfig, shape: StageShape) -> AttentionHeads:
    return AttentionHeads(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        slot_tokens=shape.slot_tokens,
    )


def _cache(
    num_blocks: int, shape: StageShape, heads: AttentionHeads, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer; the last block takes what padding writes where that can't be left out."""
    size = (num_blocks + 1, heads.num_kv_heads, BLOCK_TOKENS, heads.head_dim)
    return torch.zeros(size, dtype=shape.dtype, device=device), torch.zeros(size, dtype=shape.dtype, device=device)
