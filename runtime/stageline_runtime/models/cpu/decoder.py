"""A Llama-like decoder, cut to one stage: all families of `model_families` as one parameterised implementation.

What differs between them (head norms, biases, windows, mixtures of experts, head size, tied head, rotary scaling)
follows from `ModelConfig` and from which weights are there. Numerics follow Hugging Face's implementation operation by
operation, so that float32 runs give the same greedy tokens. The residual stream is the only tensor between layers and
between stages.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from stageline_runtime.graphs.layer_graphs import LayerGraphs
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.cpu.decoder_layer import DecoderLayer
from stageline_runtime.models.cpu.kv_cache import (
    AttentionBatch,
    CachedSlots,
    CacheShape,
    KvCache,
    build_attention_batch,
    cache_of,
)
from stageline_runtime.models.cpu.layer_attention import LayerAttention, narrow
from stageline_runtime.models.cpu.row_modules import OutputHead
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
from stageline_runtime.native.attention_kernel import HeadShape
from stageline_runtime.native.row_kernels import Kernels, kernels_if_possible
from stageline_runtime.plan_bus.messages import GraphMode, StepPlan
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.ranks.stage_ranks import StageRanks


class DecoderStage(CachedSlots):
    """Layers `first..last` of a decoder with their KV cache; the first stage embeds, the last has the head.

    `config`, weights and cache are those of this rank's part, where the stage has several.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: StageWeights,
        cache: KvCache,
        cache_shape: CacheShape,
        windows: tuple[int | None, ...],
        kernels: Kernels | None,
        *,
        shape: StageShape,
        ranks: StageRanks,
    ) -> None:
        attention, rows = (kernels.attention, kernels.rows) if kernels is not None else (None, None)
        self._embedding = weights.embedding() if shape.is_first else None
        self._layers = tuple(
            DecoderLayer(
                config,
                layer,
                LayerAttention(config, cache, index, attention, window),
                rows,
                ranks.sums(shape.layers.first + index),
                ranks.exchange(shape.layers.first + index),
            )
            for index, (layer, window) in enumerate(zip(weights.layers(), windows, strict=True))
        )
        self._graphs: LayerGraphs | None = None
        self._config = config
        self._num_ranks = ranks.tensor.size
        self._head = OutputHead(config, weights, self._embedding, rows, ranks.tensor) if shape.is_last else None
        self._rotary = RotaryTable(config, cache_shape.slot_tokens, cache_shape.dtype)
        super().__init__(cache)
        self._cache_shape = cache_shape
        self._windows = windows

    def attention_batch(self, plan: StepPlan) -> AttentionBatch:
        """Indices and masks of a plan, for `layers`; raises ValueError where a row lies outside the cache."""
        return build_attention_batch(plan.rows, plan.padded_tokens, self._cache_shape, plan.graph_mode)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._embedding is not None, "this stage holds no embedding"
        return F.embedding(token_ids, self._embedding)

    def layers(self, hidden: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        self._cache.mark_written(batch)
        rotary = self._rotary.at(batch.positions)
        batches = {window: narrow(batch, window) for window in set(self._windows) if window is not None}
        for layer, window in zip(self._layers, self._windows, strict=True):
            seen = batch if window is None else batches[window]
            if batch.graph_mode is GraphMode.OFF:
                hidden = layer(hidden, rotary, seen)
            else:
                assert self._graphs is not None, f"a plan in mode {batch.graph_mode}, but nothing was captured"
                hidden = self._graphs.run(layer, hidden, rotary, seen)
        return hidden

    @torch.inference_mode()
    def capture_graphs(
        self, graphs: GraphMode, sizes: CaptureSizes, cache_dir: Path, progress: CaptureProgress
    ) -> CaptureReport:
        """Compile the layers for plans up to `graphs`; touches no slot.

        Raises:
            GraphsUnavailableError: a mixture of experts, several ranks, no C++ compiler, or compiling failed.
        """
        if self._num_ranks > 1:
            raise GraphsUnavailableError(
                f"the stage's layers are cut over {self._num_ranks} ranks, whose sums can't be captured"
            )
        if self._config.mixture is not None:
            raise GraphsUnavailableError("the model is a mixture of experts, whose shapes depend on the tokens")
        self._graphs = LayerGraphs(graphs, cache_dir)
        return self._graphs.warm_up(self._layers, self._config.hidden_size, self._rotary, sizes, progress)

    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "this stage holds no head"
        return self._head(hidden_rows)

    @property
    def first_token(self) -> int:
        assert self._head is not None, "this stage holds no head"
        return self._head.first_token

    def head_part(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "this stage holds no head"
        return self._head.part(hidden_rows)

    def whole_head(self, part: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "this stage holds no head"
        return self._head.of_all(part)


def build_stage_model(
    model_dir: Path,
    config: ModelConfig,
    shape: StageShape,
    progress: LoadProgress,
    ranks: RankGroup | None = None,
    *,
    experts: RankGroup | None = None,
) -> DecoderStage:
    """Load a stage's weights and reserve its KV cache of `num_cohorts * slots_per_cohort` slots; with `ranks`, the part
    of both that is this rank's; with `experts`, all but other ranks' experts. `config` is that of the whole model.

    Raises:
        UnsupportedModelError: the model can't be cut over so many ranks, or both `ranks` and `experts` are several.
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    of_stage = StageRanks.of(ranks, experts)
    cut = of_stage.cut(config)
    weights = StageWeights(model_dir, config, shape, progress, cut=cut)
    config = cut.part
    cache = cache_of(config, shape)
    heads = HeadShape(
        num_kv_heads=config.num_kv_heads,
        group_size=config.group_size,
        head_dim=config.head_dim,
        slot_tokens=shape.slot_tokens,
        dtype=shape.dtype,
    )
    kernels = kernels_if_possible(heads)
    cache_shape = CacheShape(
        num_slots=shape.num_slots,
        slot_tokens=shape.slot_tokens,
        group_size=config.group_size,
        dtype=shape.dtype,
        masks=kernels is None,
    )
    windows = layer_windows(config, shape)
    return DecoderStage(config, weights, cache, cache_shape, windows, kernels, shape=shape, ranks=of_stage)


def layer_windows(config: ModelConfig, shape: StageShape) -> tuple[int | None, ...]:
    """The attention window of each of the stage's layers; one that no position reaches past is none."""
    return tuple(
        window if window is not None and window < shape.slot_tokens else None
        for window in config.attention_windows[shape.layers.first : shape.layers.last + 1]
    )
