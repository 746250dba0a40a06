"""What torch.compile can't look into, as operators of our own: packed products and attention over the slot cache.

A compiled graph takes no packed weight into its own products and must not see the cache change, so both are opaque to
it. They are called while compiling only; eager code calls what lies below directly, which costs less.
"""

import weakref
from collections.abc import Callable
from typing import Final

import torch

DecodeAttention = Callable[[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor]
"""(query and key heads, value heads, rotary, rows) to attended heads; stores the keys and values."""

_decode_attentions: "weakref.WeakValueDictionary[int, _Entry]" = weakref.WeakValueDictionary()
_library: Final = torch.library.Library("stageline", "DEF")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor rows, Tensor weight, Tensor? bias, int out_features) -> Tensor")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "decode_attention(Tensor query_key, Tensor value, Tensor cosines, Tensor sines, Tensor rows, Tensor number, "
    "int out_features) -> Tensor"
)


class _Entry:
    def __init__(self, attention: DecodeAttention) -> None:
        self.attention = attention


class DecodeAttentionHandle:
    """Names one layer's attention to compiled code by a tensor, so that one graph serves all layers."""

    def __init__(self, attention: DecodeAttention) -> None:
        self._entry = _Entry(attention)
        self.number = torch.tensor(id(self._entry), dtype=torch.int64)
        _decode_attentions[id(self._entry)] = self._entry


def packed_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`rows W^T + b` for a weight packed by oneDNN."""
    result: torch.Tensor = torch.ops.stageline.packed_linear(rows, weight, bias, weight.shape[0])
    return result


def decode_attention(
    query_key: torch.Tensor,
    value: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    number: torch.Tensor,
    out_features: int,
) -> torch.Tensor:
    """The attention that `number` names: `[num_tokens, out_features]`; stores keys and values in its cache."""
    result: torch.Tensor = torch.ops.stageline.decode_attention(query_key, value, *rotary, rows, number, out_features)
    return result


def _packed_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, _out_features: int
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


def _decode_attention(
    query_key: torch.Tensor,
    value: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    rows: torch.Tensor,
    number: torch.Tensor,
    _out_features: int,
) -> torch.Tensor:
    return _decode_attentions[int(number)].attention(query_key, value, (cosines, sines), rows)


def _shape_only(rows: torch.Tensor, *arguments: object) -> torch.Tensor:
    out_features = arguments[-1]
    assert isinstance(out_features, int), out_features
    return rows.new_empty(rows.shape[0], out_features)


for _key in ("CPU", "MkldnnCPU"):
    _library.impl("packed_linear", _packed_linear, _key)  # type: ignore[no-untyped-call]
_library.impl("decode_attention", _decode_attention, "CPU")  # type: ignore[no-untyped-call]
_library.impl("packed_linear", _shape_only, "Meta")  # type: ignore[no-untyped-call]
_library.impl("decode_attention", _shape_only, "Meta")  # type: ignore[no-untyped-call]
