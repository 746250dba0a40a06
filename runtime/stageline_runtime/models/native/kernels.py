"""All compiled kernels of a stage, or none of them: which of the two is decided once, at load, and said in the log."""

import logging
from dataclasses import dataclass

from stageline_runtime.models.native.attention_kernel import DTYPE_NAMES, AttentionKernel, HeadShape
from stageline_runtime.models.native.build import NativeUnavailableError, load_library
from stageline_runtime.models.native.row_kernels import RowKernels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What is compiled for a stage's shapes."""

    attention: AttentionKernel
    rows: RowKernels


def compile_kernels(shape: HeadShape) -> Kernels:
    """Compile and load them.

    Raises:
        NativeUnavailableError: they can't be built here, or not for these shapes.
    """
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
