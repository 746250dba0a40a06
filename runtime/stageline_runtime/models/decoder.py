"""A Llama-like decoder, cut to one stage: all families of `model_families` as one parameterised implementation.

What differs between them (head norms, biases, windows, mixtures of experts, head size, tied head, rotary scaling)
follows from `ModelConfig` and from which weights are there. Numerics follow Hugging Face's implementation operation by
operation, so that float32 runs give the same greedy tokens. The residual stream is the only tensor between layers and
between stages.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from stageline_api.runtime_config import LayerRange
from stageline_runtime.graphs.layer_graphs import LayerGraphs
from stageline_runtime.graphs.protocol import CaptureProgress, CaptureReport, CaptureSizes, GraphsUnavailableError
from stageline_runtime.messages import GraphMode, StepPlan
from stageline_runtime.model_config import ModelConfig
from stageline_runtime.models.attention_batch import AttentionBatch, CacheShape, build_attention_batch
from stageline_runtime.models.decoder_layer import DecoderLayer
from stageline_runtime.models.kv_cache import KvCache
from stageline_runtime.models.layer_attention import LayerAttention
from stageline_runtime.models.linear import Linear
from stageline_runtime.models.native.decode_kernel import DecodeKernel, HeadShape, build_decode_kernel
from stageline_runtime.models.normalization import RmsNorm
from stageline_runtime.models.rotary import RotaryTable
from stageline_runtime.models.weights import Progress, StageWeights
from stageline_runtime.models.windows import narrow


class DecoderStage:
    """Layers `first..last` of a decoder with their KV cache; the first stage embeds, the last has the head."""

    def __init__(
        self,
        config: ModelConfig,
        weights: StageWeights,
        cache: KvCache,
        cache_shape: CacheShape,
        windows: tuple[int | None, ...],
        kernel: DecodeKernel | None,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        self._embedding = weights.embedding() if is_first else None
        self._layers = tuple(
            DecoderLayer(config, layer, LayerAttention(config, cache, index, kernel, window))
            for index, (layer, window) in enumerate(zip(weights.layers(), windows, strict=True))
        )
        self._graphs: LayerGraphs | None = None
        self._config = config
        self._final_norm = RmsNorm(weights.final_norm(), config.rms_norm_eps) if is_last else None
        self._head = self._build_head(config, weights) if is_last else None
        self._rotary = RotaryTable(config, cache_shape.slot_tokens, cache_shape.dtype)
        self._cache = cache
        self._cache_shape = cache_shape
        self._windows = windows

    def _build_head(self, config: ModelConfig, weights: StageWeights) -> Linear:
        if config.tie_word_embeddings and self._embedding is not None:
            return Linear(self._embedding)
        return Linear(weights.head())

    def attention_batch(self, plan: StepPlan) -> AttentionBatch:
        """Indices and masks of a plan, for `layers`.

        Raises:
            ValueError: a row lies outside the cache.
        """
        return build_attention_batch(plan.rows, plan.padded_tokens, self._cache_shape, plan.graph_mode)

    def reset_slot(self, slot: int) -> None:
        """Zero what earlier requests left in `slot`; call it for each of a plan's fills before `layers`."""
        self._cache.reset_slot(slot)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map token ids `[num_tokens]` int64 to hidden `[num_tokens, hidden_size]`. First stage only."""
        assert self._embedding is not None, "this stage holds no embedding"
        return F.embedding(token_ids, self._embedding)

    @torch.inference_mode()
    def layers(self, hidden: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Run the stage's layers over hidden `[padded_tokens, hidden_size]`, writing their keys and values."""
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
            GraphsUnavailableError: a mixture of experts, no C++ compiler, or compiling failed.
        """
        if self._config.mixture is not None:
            raise GraphsUnavailableError("the model is a mixture of experts, whose shapes depend on the tokens")
        self._graphs = LayerGraphs(graphs, cache_dir)
        return self._graphs.warm_up(self._layers, self._config.hidden_size, self._rotary, sizes, progress)

    @torch.inference_mode()
    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Map hidden `[num_rows, hidden_size]` to float32 logits `[num_rows, vocab_size]`. Last stage only."""
        assert self._final_norm is not None, "this stage holds no head"
        assert self._head is not None, "this stage holds no head"
        return self._head(self._final_norm(hidden_rows)).to(torch.float32)


def build_stage_model(
    model_dir: Path,
    config: ModelConfig,
    layer_range: LayerRange,
    *,
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype,
    num_cohorts: int,
    slots_per_cohort: int,
    slot_tokens: int,
    progress: Progress,
) -> DecoderStage:
    """Load a stage's weights and reserve its KV cache of `num_cohorts * slots_per_cohort` slots.

    Raises:
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    weights = StageWeights(
        model_dir, config, layer_range, has_embedding=is_first, has_head=is_last, dtype=dtype, progress=progress
    )
    num_slots = num_cohorts * slots_per_cohort
    cache = KvCache(
        num_layers=layer_range.count,
        num_slots=num_slots,
        num_kv_heads=config.num_kv_heads,
        slot_tokens=slot_tokens,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    shape = CacheShape(num_slots=num_slots, slot_tokens=slot_tokens, group_size=config.group_size, dtype=dtype)
    # A window that no position reaches past is none.
    windows = tuple(
        window if window is not None and window < slot_tokens else None
        for window in config.attention_windows[layer_range.first : layer_range.last + 1]
    )
    heads = HeadShape(
        num_kv_heads=config.num_kv_heads,
        group_size=config.group_size,
        head_dim=config.head_dim,
        slot_tokens=slot_tokens,
        dtype=dtype,
    )
    kernel = build_decode_kernel(heads)
    return DecoderStage(config, weights, cache, shape, windows, kernel, is_first=is_first, is_last=is_last)
