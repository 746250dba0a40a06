"""Quantised checkpoints and what they stand for, worked out value by value in plain Python and numpy.

Nothing of the runtime's reading is used: bits are packed one value after the other as the formats' authors do, and the
dense values come from the integers and scales that went in.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Matrix = npt.NDArray[np.float32]
Parts = dict[str, torch.Tensor]
GROUP: Final = 32
BLOCK: Final = (48, 40)
"""Divides no matrix of the tiny models, so that the last blocks are smaller."""
_AWQ_PLACES: Final = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word AWQ puts column 0, 1, … of eight."""


def fp8_block(dense: Matrix) -> tuple[Parts, Matrix]:
    """One scale for each block, as DeepSeek and Qwen publish."""
    rows, columns = dense.shape
    scales = np.zeros((-(-rows // BLOCK[0]), -(-columns // BLOCK[1])), np.float32)
    stored = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    read = np.zeros_like(dense)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            scales[i, j] = np.abs(dense[part]).max() / 448
            stored[part] = torch.from_numpy(dense[part] / scales[i, j]).to(torch.float8_e4m3fn)
            read[part] = stored[part].float().numpy() * scales[i, j]
    return {"weight": stored, "weight_scale_inv": torch.from_numpy(scales)}, read


def fp8_tensor(dense: Matrix) -> tuple[Parts, Matrix]:
    """One scale for all, and one for activations that nothing here uses."""
    scale = np.float32(np.abs(dense).max() / 448)
    stored = torch.from_numpy(dense / scale).to(torch.float8_e4m3fn)
    parts = {"weight": stored, "weight_scale": torch.tensor(scale), "input_scale": torch.tensor(0.5)}
    return parts, stored.float().numpy() * scale


def fp8_channel(dense: Matrix) -> tuple[Parts, Matrix]:
    """One scale for each output, as compressed-tensors writes them."""
    scales = (np.abs(dense).max(axis=1, keepdims=True) / 448).astype(np.float32)
    stored = torch.from_numpy(dense / scales).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": torch.from_numpy(scales)}, stored.float().numpy() * scales


def awq(dense: Matrix) -> tuple[Parts, Matrix]:
    """Four bits, inputs by rows, eight outputs a word in AWQ's order."""
    integers, zeros, scales, read = _affine(dense.T, np.arange(dense.shape[1]) // GROUP, 4)
    places = [4 * place for place in _AWQ_PLACES]
    parts = {
        "qweight": _packed_columns(integers, places),
        "qzeros": _packed_columns(zeros, places),
        "scales": torch.from_numpy(scales),
    }
    return parts, read.T.copy()


def gptq(dense: Matrix, bits: int = 4, *, shuffled: bool = True, offset: int = 1) -> tuple[Parts, Matrix]:
    """Eight or four inputs a word; groups in the order of activations; zero points stored less `offset`."""
    inputs = dense.shape[1]
    groups = np.arange(inputs) // GROUP
    if shuffled:
        groups = groups[np.random.default_rng(3).permutation(inputs)]
    integers, zeros, scales, read = _affine(dense.T, groups, bits)
    places = list(range(0, 32, bits))
    parts = {
        "qweight": _packed_columns(integers.T, places).t().contiguous(),
        "qzeros": _packed_columns(zeros - offset, places),
        "scales": torch.from_numpy(scales),
    }
    if shuffled:
        parts["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return parts, read.T.copy()


def _affine(by_input: Matrix, groups: npt.NDArray[np.int64], bits: int) -> tuple[Any, Any, Any, Matrix]:
    """Integers, zero points and scales of `[inputs, outputs]`, and the values that they stand for."""
    inputs, outputs = by_input.shape
    largest, count = 2**bits - 1, int(groups.max()) + 1
    integers, read = np.zeros((inputs, outputs), np.int64), np.zeros((inputs, outputs), np.float32)
    zeros, scales = np.zeros((count, outputs), np.int64), np.zeros((count, outputs), np.float16)
    for group in range(count):
        rows = groups == group
        low, high = by_input[rows].min(axis=0), by_input[rows].max(axis=0)
        scales[group] = ((high - low) / largest).astype(np.float16)
        scale = scales[group].astype(np.float32)
        zeros[group] = np.clip(np.round(-low / scale), 1, largest)
        integers[rows] = np.clip(np.round(by_input[rows] / scale) + zeros[group], 0, largest)
        read[rows] = (integers[rows] - zeros[group]) * scale
    return integers, zeros, scales, read


def _packed_columns(values: npt.NDArray[np.int64], places: list[int]) -> torch.Tensor:
    rows, columns = values.shape
    words = np.zeros((rows, columns // len(places)), np.uint64)
    for column in range(columns):
        shift = places[column % len(places)]
        words[:, column // len(places)] |= values[:, column].astype(np.uint64) << np.uint64(shift)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


FORMS: Final[dict[str, tuple[dict[str, Any], Callable[[Matrix], tuple[Parts, Matrix]]]]] = {
    "fp8 by block": ({"quant_method": "fp8", "weight_block_size": list(BLOCK)}, fp8_block),
    "fp8 by tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fp8 by channel": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
        },
        fp8_channel,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq in the order of activations": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        gptq,
    ),
    "gptq of eight bits, second format": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda dense: gptq(dense, 8, shuffled=False, offset=0),
    ),
}
"""`quantization_config` and how a matrix is then stored, by name."""


def quantize_checkpoint(directory: Path, form: str) -> dict[str, torch.Tensor]:
    """Store the layers' matrices of a float32 checkpoint in `form`; returns all tensors as they are to be read."""
    config, store = FORMS[form]
    path = directory / "model.safetensors"
    stored: Parts = {}
    read: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if ".layers." not in name or tensor.dim() != 2:
            stored[name] = read[name] = tensor
            continue
        parts, dense = store(tensor.numpy())
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{part}": each.contiguous() for part, each in parts.items()}
        read[name] = torch.from_numpy(dense)
    save_file(stored, path, metadata={"format": "pt"})
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(fields | {"quantization_config": config}), encoding="utf-8")
    return read
