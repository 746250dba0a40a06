"""What a layer does to each row by itself, through the compiled kernels: normalisation and the feed-forward gate.

Each does in one pass over memory what takes plain operators four to eight, with their roundings. A stage has all
compiled kernels, those of attention included, or none: which of the two is decided once, at load, and said in the log.
"""

import ctypes
import logging
from dataclasses import dataclass

import torch

from stageline_runtime.native.attention_kernel import DTYPE_NAMES, AttentionKernel, HeadShape
from stageline_runtime.native.build import NativeUnavailableError, load_library

_NORM_ARGUMENTS = (*(ctypes.c_void_p,) * 4, ctypes.c_int64, ctypes.c_int64, ctypes.c_float, ctypes.c_int64)
_GATE_ARGUMENTS = (*(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 3)


class RowKernels:
    """Normalisation and gate for rows of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._rms_norm = getattr(library, f"rms_norm_{DTYPE_NAMES[dtype]}")
        self._rms_norm.argtypes, self._rms_norm.restype = _NORM_ARGUMENTS, None
        self._gate = getattr(library, f"gate_{DTYPE_NAMES[dtype]}")
        self._gate.argtypes, self._gate.restype = _GATE_ARGUMENTS, None
        self._num_threads = torch.get_num_threads()

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`rows / rms(rows) * weight` for rows `[num_rows, size]`."""
        return self._normalise(rows, None, weight, eps)

    def add_rms_norm(self, rows: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The same of `rows + addend`; the sum takes `addend`'s place."""
        return self._normalise(rows, addend, weight, eps)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` `[num_rows, size]` for rows `[gate, up]` `[num_rows, 2 * size]`."""
        self._check(gate_up)
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, size)
        self._gate(gate_up.data_ptr(), output.data_ptr(), num_rows, size, self._num_threads)
        return output

    def _normalise(
        self, rows: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        num_rows, size = rows.shape
        for tensor in (rows, weight, *(() if addend is None else (addend,))):
            self._check(tensor)
        assert weight.shape == (size,), weight.shape
        assert addend is None or addend.shape == rows.shape, rows.shape
        output = torch.empty_like(rows)
        self._rms_norm(
            rows.data_ptr(),
            None if addend is None else addend.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            num_rows,
            size,
            eps,
            self._num_threads,
        )
        return output

    def _check(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous(), tensor.stride()
        assert tensor.dtype == self.dtype, tensor.dtype


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    attention: AttentionKernel
    rows: RowKernels


def compile_kernels(shape: HeadShape) -> Kernels:
    """Compile and load them; raises NativeUnavailableError where they can't be built here, or not for these shapes."""
    if shape.dtype not in DTYPE_NAMES:
        raise NativeUnavailableError(f"{shape.dtype} is not built")
    library = load_library()
    return Kernels(AttentionKernel(library, shape), RowKernels(library, shape.dtype))


def kernels_if_possible(shape: HeadShape) -> Kernels | None:
    """The kernels, or None where they can't be had: the plain operators then do their work."""
    try:
        return compile_kernels(shape)
    except NativeUnavailableError as reason:
        logger.warning("layers run on torch's own operators alone, which is slower: %s", reason)
        return None
