"""Dense matrices from quantised ones, as they are read: FP8 with scales, AWQ and GPTQ packed into words of 32 bits.

Every value is computed in float32 and rounded once, to the dtype asked for: what a kernel for packed weights would
multiply with, had it no rounding of its own. A part that is missing, misshapen or of another kind is an error that
names it; nothing is guessed.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from stageline_runtime.model_facts.quantization import WORD_BITS, Quantization, Shape

AWQ_COLUMNS: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each four bits of a word hold, from the lowest on."""
_MATRIX: Final = 2


class QuantizedTensorError(ValueError):
    """The parts of a matrix don't fit; the message says which."""


def dense_shape(quantization: Quantization, parts: Mapping[str, Shape]) -> Shape:
    """`[out_features, in_features]` of the matrix that parts of these shapes, by the last word of their names, make.

    Raises:
        QuantizedTensorError: they don't fit one another.
    """
    if "qweight" not in parts:
        return parts["weight"]
    per_word = WORD_BITS // quantization.bits
    rows, columns = _two(parts["qweight"], "qweight")
    inputs, outputs = (rows, columns * per_word) if quantization.form == "awq" else (rows * per_word, columns)
    groups = -(-inputs // (quantization.group_size or inputs))
    expected = {"scales": (groups, outputs), "qzeros": (groups, outputs // per_word), "g_idx": (inputs,)}
    for part in ("scales", "qzeros"):
        if part not in parts:
            raise QuantizedTensorError(f"{part} is missing")
    for part, shape in parts.items():
        if part in expected and shape != expected[part]:
            raise QuantizedTensorError(f"{part} has shape {list(shape)}, not {list(expected[part])}")
    return outputs, inputs


def dequantize(quantization: Quantization, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The dense matrix `[out_features, in_features]` in `dtype`; a new tensor.

    Raises:
        QuantizedTensorError: the parts don't fit one another.
    """
    dense_shape(quantization, {part: tuple(tensor.shape) for part, tensor in parts.items()})
    if quantization.form == "fp8":
        scale = next((tensor for part, tensor in parts.items() if part.startswith("weight_scale")), None)
        if scale is None:
            raise QuantizedTensorError("there is no weight_scale")
        weight = parts["weight"].to(torch.float32)
        return (weight * _spread(scale.to(torch.float32), tuple(weight.shape), quantization.block)).to(dtype)
    return _from_words(quantization, parts).t().to(dtype).contiguous()


def _spread(scale: torch.Tensor, shape: Shape, block: tuple[int, int] | None) -> torch.Tensor:
    """A scale for every element: one for all, one for each row, or one for each block."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.numel() == shape[0] and tuple(scale.shape) in ((shape[0],), (shape[0], 1)):
        return scale.reshape(-1, 1)
    rows, columns = shape
    if block is None or tuple(scale.shape) != (-(-rows // block[0]), -(-columns // block[1])):
        raise QuantizedTensorError(
            f"its scale has shape {list(scale.shape)}; with weight_block_size {block} of a matrix {list(shape)} it is "
            "neither one scale, nor one for each row, nor one for each block"
        )
    return scale.repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :columns]


def _from_words(quantization: Quantization, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`[in_features, out_features]` float32: scale x (value - zero point), by group of inputs."""
    bits, scales = quantization.bits, parts["scales"].to(torch.float32)
    if quantization.form == "awq":
        values, zeros = (_unpack(parts[part], bits, AWQ_COLUMNS) for part in ("qweight", "qzeros"))
    else:
        in_order = range(WORD_BITS // bits)
        values = _unpack(parts["qweight"].t(), bits, in_order).t()
        zeros = (_unpack(parts["qzeros"], bits, in_order) + quantization.zero_offset) & (2**bits - 1)
    groups = parts.get("g_idx")
    if groups is None:
        groups = torch.arange(values.shape[0]) // (quantization.group_size or values.shape[0])
    groups = groups.to(torch.int64)
    if bool(((groups < 0) | (groups >= scales.shape[0])).any()):
        raise QuantizedTensorError(f"g_idx names groups beyond the {scales.shape[0]} that there are")
    return (values - zeros[groups]).to(torch.float32) * scales[groups]


def _unpack(words: torch.Tensor, bits: int, columns: Sequence[int]) -> torch.Tensor:
    """`[rows, words]` int32 to `[rows, words * len(columns)]` int32: the n-th bits of a word are `columns[n]`."""
    if words.dtype != torch.int32:
        raise QuantizedTensorError(f"packed values are {words.dtype}, not int32")
    found = torch.empty(*words.shape, len(columns), dtype=torch.int32)
    for place, column in enumerate(columns):
        found[..., column] = (words >> (bits * place)) & (2**bits - 1)
    return found.reshape(words.shape[0], -1)


def _two(shape: Shape, part: str) -> tuple[int, int]:
    if len(shape) != _MATRIX:
        raise QuantizedTensorError(f"{part} has shape {list(shape)}, which is no matrix's")
    return shape[0], shape[1]
