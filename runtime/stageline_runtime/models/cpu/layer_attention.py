"""One layer's attention over its part of the KV cache: store the step's keys and values, then attend.

Where the compiled kernels can be had they do all of it; elsewhere torch's operators do, over the batch's masks.
"""

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.cpu.attention import attend
from stageline_runtime.models.cpu.attention_batch import AttentionBatch
from stageline_runtime.models.cpu.kv_cache import KvCache
from stageline_runtime.models.cpu.operators import DecodeAttentionHandle
from stageline_runtime.models.native.attention_kernel import AttentionInputs, AttentionKernel
from stageline_runtime.models.rotary import rotate

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `[num_tokens, 1, head_dim]`."""


class LayerAttention:
    """Attention of the stage's layer number `layer`; `window` as in `windows`, None for all positions."""

    def __init__(
        self, config: ModelConfig, cache: KvCache, layer: int, kernel: AttentionKernel | None, window: int | None
    ) -> None:
        self._num_heads = config.num_heads
        self.out_features = config.num_heads * config.head_dim
        self._cache = cache
        self._layer = layer
        self._kernel = kernel
        self._window = window
        self.handle = None if kernel is None else DecodeAttentionHandle(self.decode)

    def __call__(
        self, query_key: torch.Tensor, value: torch.Tensor, rotary: Rotary, batch: AttentionBatch
    ) -> torch.Tensor:
        """Map heads `[padded_tokens, heads, head_dim]`, not rotated yet, to `[padded_tokens, num_heads * head_dim]`."""
        if self._kernel is None:
            return self.rotated(rotate(query_key, *rotary), value, batch)
        return self._compiled(self._kernel, query_key, value, rotary, batch)

    def rotated(self, query_key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """The same for heads that are rotated already."""
        if self._kernel is not None:
            return self._compiled(self._kernel, query_key, value, None, batch)
        self._cache.write(self._layer, query_key[:, self._num_heads :], value, batch)
        return attend(
            query_key[:, : self._num_heads], self._cache.keys[self._layer], self._cache.values[self._layer], batch
        )

    def decode(self, query_key: torch.Tensor, value: torch.Tensor, rotary: Rotary, rows: torch.Tensor) -> torch.Tensor:
        """The same for nothing but single-token rows and padding; `rows` has one for each token."""
        assert self._kernel is not None, "no compiled kernel"
        inputs = self._inputs(query_key, value, rotary)
        self._kernel.decode(inputs, rows)
        return inputs.output

    def _compiled(
        self,
        kernel: AttentionKernel,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        inputs = self._inputs(query_key, value, rotary)
        if batch.decode_rows.shape[0]:
            kernel.decode(inputs, batch.decode_rows)
        if batch.chunk_rows.shape[0]:
            kernel.prefill(inputs, batch.chunk_rows)
        return inputs.output

    def _inputs(self, query_key: torch.Tensor, value: torch.Tensor, rotary: Rotary | None) -> AttentionInputs:
        cache = (self._cache.keys[self._layer], self._cache.values[self._layer])
        output = query_key.new_empty(query_key.shape[0], self.out_features)
        return AttentionInputs(query_key, value, rotary, cache, output, self._window)
