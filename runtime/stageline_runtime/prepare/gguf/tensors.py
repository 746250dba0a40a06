"""Maps GGUF tensors to Hugging Face names and dequantises them to bfloat16, a few rows at a time.

llama.cpp stores a Llama's q and k with the rows of each head interleaved for its own rotary embedding; the rows are
put back in order here. A quantised row is independent of the others, so reordering rows before dequantising is exact.
Qwen3 is stored in order. A tensor without a known name is refused: leaving it out would change the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import ReaderTensor
from gguf.quants import dequantize

from stageline_runtime.prepare.errors import BadConfigError
from stageline_runtime.prepare.gguf.metadata import GgufModel

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
CHUNK_ELEMENTS = 1 << 22
"""Elements dequantised at once: 16 MiB of float32."""


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """A tensor to write: its Hugging Face name, shape `[rows, columns]` (or `[size]`), and its bytes in order."""

    name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[bytes]]

    @property
    def num_bytes(self) -> int:
        """Size in bfloat16."""
        return 2 * int(np.prod(self.shape))


def converted_tensors(model: GgufModel) -> list[ConvertedTensor]:
    """All tensors of the model under their Hugging Face names, in file order. Reads no tensor data yet.

    Raises:
        BadConfigError: a tensor has no place in this architecture, or one that the architecture needs is missing.
    """
    names = expected_names(model.architecture, model.required_hyper("block_count"))
    unknown = sorted(model.tensor_names - names.keys())
    if unknown:
        raise BadConfigError(f"{model.path.name}: tensor {unknown[0]} is not part of a {model.architecture} model")
    missing = sorted(names.keys() - model.tensor_names - {"output.weight"})
    if missing:
        raise BadConfigError(f"{model.path.name}: tensor {missing[0]} is missing; the file is not a whole model")
    return [_converted(model, names[tensor.name], tensor) for tensor in model.reader.tensors]


def expected_names(architecture: str, num_layers: int) -> dict[str, str]:
    """GGUF name to Hugging Face name, for every tensor a model of this architecture may have."""
    names = dict(OUTER_NAMES)
    layer_names = {**LAYER_NAMES, **(QK_NORM_NAMES if architecture == "qwen3" else {})}
    for layer in range(num_layers):
        for ours, theirs in layer_names.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    return names


def rotary_row_order(num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
    """Index of the stored row for each Hugging Face row of a Llama's q or k. Shape `[num_rows]`.

    A stored head alternates rows of its first and second half; Hugging Face keeps the halves apart.
    """
    half = num_rows // num_heads // 2
    return np.arange(num_rows).reshape(num_heads, half, 2).swapaxes(1, 2).reshape(-1)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 to bfloat16, ties to even; returned as its bit patterns."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def _converted(model: GgufModel, name: str, tensor: ReaderTensor) -> ConvertedTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    num_heads = 0
    if model.architecture == "llama":
        num_heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}.get(name.split(".")[-2], 0)
    order = rotary_row_order(shape[0], num_heads) if num_heads else None
    return ConvertedTensor(name, shape, lambda: _chunks(model, tensor, shape, order))


def _chunks(
    model: GgufModel, tensor: ReaderTensor, shape: tuple[int, ...], order: npt.NDArray[np.intp] | None
) -> Iterator[bytes]:
    rows = tensor.data.reshape(1, -1) if len(shape) == 1 else tensor.data
    rows_at_once = max(1, CHUNK_ELEMENTS // shape[-1])
    for start in range(0, len(rows), rows_at_once):
        chosen = slice(start, start + rows_at_once) if order is None else order[start : start + rows_at_once]
        try:
            values = dequantize(rows[chosen], tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise BadConfigError(f"{model.path.name}: tensor {tensor.name} is of type {kind}, not supported") from error
        if not np.isfinite(values).all():
            raise BadConfigError(f"{model.path.name}: tensor {tensor.name} holds a value that is not a finite number")
        yield to_bfloat16(values).astype("<u2", copy=False).tobytes()
