"""Attention of a layer in one call for each kind of row: rotate, store, attend, through the compiled kernels.

Tensors are handed over by address, so every stride and dtype is checked here first. Work is divided over torch's own
number of threads. Scratch memory is allocated once, at load.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch

from stageline_runtime.native.build import NativeUnavailableError
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS

MOST_HEAD_SIZE = 256
MOST_GROUP_SIZE = 16
_QUERY_ROWS, _BLOCK_KEYS = 192, 64
"""As in prefill_step.h."""
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Arguments(ctypes.Structure):
    """`attention_arguments` of kernels.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_key", "value", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "output", "scratch", "tiles", "block_table")),
        *((name, ctypes.c_int64) for name in ("query_key_stride", "value_stride", "head_stride", "blocks_per_slot")),
        ("num_tiles", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "group_size", "head_dim", "window", "num_threads")),
        ("scratch_floats", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    num_kv_heads: int
    group_size: int
    head_dim: int
    slot_tokens: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One layer's heads of a step, and where they go.

    query_key: `[num_tokens, num_heads + num_kv_heads, head_dim]`.
    value: `[num_tokens, num_kv_heads, head_dim]`.
    rotary: cosines and sines `[num_tokens, 1, head_dim]` to rotate queries and keys by; None when they are already.
    cache: keys and values `[num_blocks, num_kv_heads, BLOCK_TOKENS, head_dim]`, the blocks of a head side by side.
    block_table: `[num_slots + 1, blocks_per_slot]` int32.
    output: `[num_tokens, num_heads * head_dim]`.
    window: positions that a query sees, its own included; None for all.
    """

    query_key: torch.Tensor
    value: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    cache: tuple[torch.Tensor, torch.Tensor]
    block_table: torch.Tensor
    output: torch.Tensor
    window: int | None


class AttentionKernel:
    """The compiled attention for one stage's shapes.

    Raises:
        NativeUnavailableError: it is not built for these shapes.
    """

    def __init__(self, library: ctypes.CDLL, shape: HeadShape) -> None:
        if shape.head_dim > MOST_HEAD_SIZE or shape.group_size > MOST_GROUP_SIZE or shape.head_dim % 2:
            raise NativeUnavailableError(f"heads of {shape.head_dim} in groups of {shape.group_size} are not built")
        self._shape = shape
        name = DTYPE_NAMES[shape.dtype]
        self._decode = _function(library, f"decode_step_{name}")
        self._prefill = _function(library, f"prefill_step_{name}")
        self._num_threads = torch.get_num_threads()
        self._scratch = torch.empty(self._num_threads, _scratch_floats(shape))

    def decode(self, inputs: AttentionInputs, tiles: torch.Tensor) -> None:
        """Store and attend single tokens; other rows of the output stay as they are.

        `tiles`: first token, number of tokens (one), slot and position of each, `[num_tiles, 4]` int32; slot -1 gives
        zeros and stores nothing.
        """
        self._call(self._decode, inputs, tiles)

    def prefill(self, inputs: AttentionInputs, tiles: torch.Tensor) -> None:
        """Store and attend chunks, of which `tiles` are the same; other rows of the output stay as they are."""
        self._call(self._prefill, inputs, tiles)

    def _call(self, function: Any, inputs: AttentionInputs, tiles: torch.Tensor) -> None:
        shape, (keys, values), output = self._shape, inputs.cache, inputs.output
        query_key, value = inputs.query_key, inputs.value
        cosines, sines = inputs.rotary if inputs.rotary is not None else (None, None)
        self._check(query_key, value, (keys, values))
        contiguous = (tiles, inputs.block_table, output, *(inputs.rotary or ()))
        assert all(tensor.is_contiguous() for tensor in contiguous), [tensor.stride() for tensor in contiguous]
        assert tiles.dtype == inputs.block_table.dtype == torch.int32, (tiles.dtype, inputs.block_table.dtype)
        arguments = _Arguments(
            query_key=query_key.data_ptr(),
            value=value.data_ptr(),
            cosines=None if cosines is None else cosines.data_ptr(),
            sines=None if sines is None else sines.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            output=output.data_ptr(),
            scratch=self._scratch.data_ptr(),
            tiles=tiles.data_ptr(),
            block_table=inputs.block_table.data_ptr(),
            query_key_stride=query_key.stride(0),
            value_stride=value.stride(0),
            head_stride=keys.stride(1),
            blocks_per_slot=inputs.block_table.shape[1],
            num_tiles=tiles.shape[0],
            num_kv_heads=shape.num_kv_heads,
            group_size=shape.group_size,
            head_dim=shape.head_dim,
            window=inputs.window or 0,
            num_threads=self._num_threads,
            scratch_floats=self._scratch.shape[1],
            scale=1 / math.sqrt(shape.head_dim),
        )
        function(ctypes.byref(arguments))

    def _check(self, query_key: torch.Tensor, value: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> None:
        head_strides = (self._shape.head_dim, 1)
        assert query_key.stride()[1:] == head_strides, query_key.stride()
        assert value.stride()[1:] == head_strides, value.stride()
        assert query_key.dtype == value.dtype == self._shape.dtype, (query_key.dtype, value.dtype)
        block = (BLOCK_TOKENS * self._shape.head_dim, *head_strides)
        for part in cache:
            assert (part.stride(0), *part.stride()[2:]) == block, part.stride()
            assert part.shape[2] == BLOCK_TOKENS, part.shape


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.argtypes = [ctypes.POINTER(_Arguments)]
    function.restype = None
    return function


def _scratch_floats(shape: HeadShape) -> int:
    """Floats of one thread: `prefill_scratch` of prefill_step.h, or a decode row's scores where these are more."""
    width = -(-shape.head_dim // 64) * 64
    prefill = _QUERY_ROWS * (2 * _BLOCK_KEYS + width + shape.head_dim + 2) + _BLOCK_KEYS * (width + shape.head_dim)
    return max(prefill, shape.group_size * shape.slot_tokens)
