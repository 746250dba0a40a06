"""The layers of a stage on a device, in the pieces that graphs are captured from: around attention, and attention.

Eager runs, piecewise graphs and full graphs call the same methods on the same tensors, so that they compute alike.
"""

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.cpu.decoder_layer import LayerParts
from stageline_runtime.models.device.attention import DeviceAttention, DeviceRows
from stageline_runtime.models.device.grouped_experts import GroupedExperts
from stageline_runtime.models.device.row_operators import TritonRows
from stageline_runtime.models.rotary import RotaryTable
from stageline_runtime.models.weights.stage_weights import ExpertWeights, LayerWeights
from stageline_runtime.ranks.expert_exchange import ExpertExchange
from stageline_runtime.ranks.layer_sums import LayerSums

Rotary = tuple[torch.Tensor, torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor]
"""Rotated query and key heads, and value heads: `[padded_tokens, heads, head_dim]`."""


class DeviceLayerParts(LayerParts):
    """A layer's parts on a device; with `rows`, what is done to each row by itself takes one launch each."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        rows: TritonRows | None,
        sums: LayerSums | None,
        exchange: ExpertExchange | None,
    ) -> None:
        super().__init__(config, weights, rows, sums, exchange, GroupedExperts)
        self._rows = rows
        self._gated_size = _gated_size(weights)

    def before_attention(self, hidden: torch.Tensor, rotary: Rotary) -> Heads:
        if self._rows is None:
            return super().before_attention(hidden, rotary)
        query_key, value = self._projected(hidden)
        return self._rows.rotate(query_key, *rotary, self._head_norm), value

    def warm_up(self, hidden: torch.Tensor, rotary: Rotary) -> None:
        """Launch each kernel on rows once, so that it gets compiled; nothing is asked of other ranks."""
        if self._rows is None:
            return
        self.before_attention(hidden, rotary)
        self._feed_forward_norm.after_adding(hidden, hidden.clone())
        if self._gated_size:
            self._rows.gate(hidden.new_zeros(len(hidden), self._gated_size))


def _gated_size(weights: LayerWeights) -> int:
    """Columns of gate and up together that the layer's rows go through: none in a mixture without a shared expert."""
    block = weights.feed_forward
    if not isinstance(block, ExpertWeights):
        return len(block.gate_up.weight)
    return 0 if block.shared is None else len(block.shared.block.gate_up.weight)


class DeviceLayers:
    def __init__(
        self,
        parts: tuple[DeviceLayerParts, ...],
        caches: tuple[tuple[torch.Tensor, torch.Tensor], ...],
        windows: tuple[int | None, ...],
        attention: DeviceAttention,
        rotary: RotaryTable,
    ) -> None:
        self._parts = parts
        self._caches = caches
        self._windows = windows
        self._attention = attention
        self._rotary = rotary

    def __len__(self) -> int:
        return len(self._parts)

    def rotary(self, rows: DeviceRows) -> Rotary:
        return self._rotary.at(rows.tokens[:, 1].long())

    def before(self, layer: int, hidden: torch.Tensor, rotary: Rotary) -> Heads:
        """What comes before attention of `layer`: hidden `[padded_tokens, hidden_size]` to heads."""
        return self._parts[layer].before_attention(hidden, rotary)

    def attend(self, layer: int, heads: Heads, rows: DeviceRows) -> torch.Tensor:
        """Store and attend: `[padded_tokens, num_heads * head_dim]`."""
        return self._attention(*heads, self._caches[layer], rows, self._windows[layer])

    def after(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What comes after it: hidden and attended to hidden."""
        return self._parts[layer].after_attention(hidden, attended)

    def warm_up_parts(self, hidden: torch.Tensor, rows: DeviceRows) -> None:
        """Run every layer's kernels on rows over `hidden` of padding, which reaches neither cache nor other ranks."""
        rotary = self.rotary(rows)
        for part in self._parts:
            part.warm_up(hidden, rotary)

    def warm_up(self, heads: Heads, rows: DeviceRows) -> None:
        """Run attention alone over rows of padding, which writes to no slot: its kernels get compiled."""
        self._attention(*heads, self._caches[0], rows, self._windows[0])

    def __call__(self, hidden: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
        """All layers: hidden `[padded_tokens, hidden_size]` to the same shape."""
        rotary = self.rotary(rows)
        for layer in range(len(self)):
            heads = self.before(layer, hidden, rotary)
            hidden = self.after(layer, hidden, self.attend(layer, heads, rows))
        return hidden
