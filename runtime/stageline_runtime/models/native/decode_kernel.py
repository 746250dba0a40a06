"""The decode part of a layer in one call: rotate, store, attend, for single-token rows, through the compiled kernel.

Tensors are handed over by address, so every stride and dtype is checked here first. Work is divided over torch's own
number of threads. Scratch memory is allocated once, at load.
"""

import ctypes
import logging
import math
from dataclasses import dataclass

import torch

from stageline_runtime.models.native.build import NativeUnavailableError, load_library

logger = logging.getLogger(__name__)

MOST_HEAD_SIZE = 256
MOST_GROUP_SIZE = 16
_FUNCTIONS = {torch.float32: "decode_step_float32", torch.bfloat16: "decode_step_bfloat16"}


class _Arguments(ctypes.Structure):
    """`decode_arguments` of decode.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_key", "value", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "output", "scores", "rows")),
        *((name, ctypes.c_int64) for name in ("query_key_stride", "value_stride", "slot_tokens", "num_rows")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "group_size", "head_dim", "window", "num_threads")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes that stay the same for a stage's life."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    slot_tokens: int
    dtype: torch.dtype


class DecodeKernel:
    """The compiled kernel for one stage's shapes.

    Raises:
        NativeUnavailableError: it can't be built here, or not for these shapes.
    """

    def __init__(self, shape: HeadShape) -> None:
        if shape.head_dim > MOST_HEAD_SIZE or shape.group_size > MOST_GROUP_SIZE or shape.head_dim % 2:
            raise NativeUnavailableError(f"heads of {shape.head_dim} in groups of {shape.group_size} are not built")
        if shape.dtype not in _FUNCTIONS:
            raise NativeUnavailableError(f"{shape.dtype} is not built")
        self._shape = shape
        self._library = load_library()
        self._function = getattr(self._library, _FUNCTIONS[shape.dtype])
        self._function.argtypes = [ctypes.POINTER(_Arguments)]
        self._function.restype = None
        self._num_threads = torch.get_num_threads()
        self._scores = torch.empty(self._num_threads, shape.group_size, shape.slot_tokens)

    def __call__(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        output: torch.Tensor,
        window: int | None,
    ) -> None:
        """Attend the step's single-token rows into `output`; rows of other tokens stay as they are.

        Args:
            query_key: `[num_tokens, num_heads + num_kv_heads, head_dim]`; with `rotary` None only the first
                `num_heads` heads are read, rotated already, and the cache holds the row's own key and value.
            value: `[num_tokens, num_kv_heads, head_dim]`.
            rotary: cosines and sines `[num_tokens, 1, head_dim]` to rotate by before storing and attending.
            cache: keys and values `[num_slots, num_kv_heads, slot_tokens, head_dim]`.
            rows: token, slot and position of each row, `[num_rows, 3]` int64; slot -1 gives zeros and stores nothing.
            output: `[num_tokens, num_heads * head_dim]`.
            window: positions that a query sees, its own included; None for all.
        """
        shape = self._shape
        cosines, sines = rotary if rotary is not None else (None, None)
        self._check(query_key, value, (*cache, rows, output, *(rotary or ())))
        arguments = _Arguments(
            query_key=query_key.data_ptr(),
            value=value.data_ptr(),
            cosines=None if cosines is None else cosines.data_ptr(),
            sines=None if sines is None else sines.data_ptr(),
            keys=cache[0].data_ptr(),
            values=cache[1].data_ptr(),
            output=output.data_ptr(),
            scores=self._scores.data_ptr(),
            rows=rows.data_ptr(),
            query_key_stride=query_key.stride(0),
            value_stride=value.stride(0),
            slot_tokens=shape.slot_tokens,
            num_rows=rows.shape[0],
            num_kv_heads=shape.num_kv_heads,
            group_size=shape.group_size,
            head_dim=shape.head_dim,
            window=window or 0,
            num_threads=self._num_threads,
            scale=1 / math.sqrt(shape.head_dim),
        )
        self._function(ctypes.byref(arguments))

    def _check(self, query_key: torch.Tensor, value: torch.Tensor, contiguous: tuple[torch.Tensor, ...]) -> None:
        head_strides = (self._shape.head_dim, 1)
        assert query_key.stride()[1:] == head_strides, query_key.stride()
        assert value.stride()[1:] == head_strides, value.stride()
        assert query_key.dtype == value.dtype == self._shape.dtype, (query_key.dtype, value.dtype)
        assert all(tensor.is_contiguous() for tensor in contiguous), [tensor.stride() for tensor in contiguous]


def build_decode_kernel(shape: HeadShape) -> DecodeKernel | None:
    """The kernel, or None where it can't be had, which is said in the log: the plain operators then do its work."""
    try:
        return DecodeKernel(shape)
    except NativeUnavailableError as reason:
        logger.warning("decode attention runs on torch's own operators, which is slower: %s", reason)
        return None
