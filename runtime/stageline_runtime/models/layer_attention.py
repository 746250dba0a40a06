"""One layer's attention over its part of the KV cache: store the step's keys and values, then attend.

Single-token rows go through the compiled decode kernel where there is one, everything else through torch's operators.
"""

from dataclasses import replace

import torch

from stageline_runtime.model_config import ModelConfig
from stageline_runtime.models.attention import attend
from stageline_runtime.models.attention_batch import AttentionBatch
from stageline_runtime.models.kv_cache import KvCache
from stageline_runtime.models.native.decode_kernel import DecodeKernel
from stageline_runtime.models.operators import DecodeAttentionHandle
from stageline_runtime.models.rotary import rotate

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `[num_tokens, 1, head_dim]`."""


class LayerAttention:
    """Attention of the stage's layer number `layer`; `window` as in `windows`, None for all positions."""

    def __init__(
        self, config: ModelConfig, cache: KvCache, layer: int, kernel: DecodeKernel | None, window: int | None
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
        if self._kernel is not None and not batch.prefill:
            return self.decode(query_key, value, rotary, batch.decode_rows)
        return self.rotated(rotate(query_key, *rotary), value, batch)

    def rotated(self, query_key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """The same for heads that are rotated already."""
        keys, values = self._cache.keys[self._layer], self._cache.values[self._layer]
        self._cache.write(self._layer, query_key[:, self._num_heads :], value, batch)
        query = query_key[:, : self._num_heads]
        if self._kernel is None or not batch.decode:
            return attend(query, keys, values, batch)
        output = attend(query, keys, values, replace(batch, decode=()))
        self._kernel(query_key, value, None, (keys, values), batch.decode_rows, output, self._window)
        return output

    def decode(self, query_key: torch.Tensor, value: torch.Tensor, rotary: Rotary, rows: torch.Tensor) -> torch.Tensor:
        """The same for nothing but single-token rows and padding; `rows` has one for each token."""
        assert self._kernel is not None, "no compiled kernel"
        cache = (self._cache.keys[self._layer], self._cache.values[self._layer])
        output = query_key.new_empty(query_key.shape[0], self.out_features)
        self._kernel(query_key, value, rotary, cache, rows, output, self._window)
        return output
