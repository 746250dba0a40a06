"""One stage's weights, read by tensor name: the layers it holds and, at the ends, embedding, final norm and head.

A stage never reads a tensor of another stage. With tied embeddings the first and the last stage both read the matrix.
Projections that share an input are fused at load: query, key and value into one matrix, gate and up into
one. Missing and misshapen tensors are found from the headers before any data is read.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_config import ModelConfig
from stageline_runtime.models.checkpoint import check_shapes, read_tensors

Progress = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes) after each tensor."""

EMBEDDING_NAME = "model.embed_tokens.weight"
_FINAL_NORM_NAME = "model.norm.weight"
_HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A matrix `[out_features, in_features]` and its bias `[out_features]`, if the model has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. `qkv` stacks query, key, value rows; `gate_up` stacks gate and up rows."""

    input_norm: torch.Tensor
    qkv: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Projection
    feed_forward_norm: torch.Tensor
    gate_up: Projection
    down: Projection


def stage_tensor_shapes(
    config: ModelConfig, layer_range: LayerRange, *, has_embedding: bool, has_head: bool
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors a stage needs, as Hugging Face names them."""
    shapes: dict[str, tuple[int, ...]] = {}
    vocabulary = (config.vocab_size, config.hidden_size)
    if has_embedding:
        shapes[EMBEDDING_NAME] = vocabulary
    for layer in range(layer_range.first, layer_range.last + 1):
        shapes |= _layer_shapes(config, f"model.layers.{layer}")
    if has_head:
        shapes[_FINAL_NORM_NAME] = (config.hidden_size,)
        shapes[head_name(config)] = vocabulary
    return shapes


def head_name(config: ModelConfig) -> str:
    """Name of the tensor that the head multiplies with."""
    return EMBEDDING_NAME if config.tie_word_embeddings else _HEAD_NAME


def stage_weight_bytes(
    model_dir: Path,
    config: ModelConfig,
    layer_range: LayerRange,
    *,
    has_embedding: bool,
    has_head: bool,
    dtype: torch.dtype,
) -> int:
    """Bytes of the stage's tensors as `dtype`, which is where `progress` ends; reads file headers only.

    Raises:
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    shapes = stage_tensor_shapes(config, layer_range, has_embedding=has_embedding, has_head=has_head)
    check_shapes(model_dir, shapes)
    return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize


class StageWeights:
    """The stage's tensors in one dtype, read when asked for, so that never more than one layer is held twice.

    Raises:
        WeightsError: a tensor is missing or misshapen, or a file is unreadable; found here, from the headers.
    """

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        layer_range: LayerRange,
        *,
        has_embedding: bool,
        has_head: bool,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self._model_dir = model_dir
        self._config = config
        self._layer_range = layer_range
        self._shapes = stage_tensor_shapes(config, layer_range, has_embedding=has_embedding, has_head=has_head)
        self._dtype = dtype
        self._progress = progress
        check_shapes(model_dir, self._shapes)
        self._loaded_bytes = 0
        self._total_bytes = sum(math.prod(shape) for shape in self._shapes.values()) * dtype.itemsize

    def embedding(self) -> torch.Tensor:
        """`[vocab_size, hidden_size]`."""
        return self._read([EMBEDDING_NAME])[EMBEDDING_NAME]

    def layers(self) -> Iterator[LayerWeights]:
        """The stage's layers in order."""
        for layer in range(self._layer_range.first, self._layer_range.last + 1):
            prefix = f"model.layers.{layer}"
            yield _fuse_layer(self._read(list(_layer_shapes(self._config, prefix))), prefix)

    def final_norm(self) -> torch.Tensor:
        """`[hidden_size]`."""
        return self._read([_FINAL_NORM_NAME])[_FINAL_NORM_NAME]

    def head(self) -> torch.Tensor:
        """`[vocab_size, hidden_size]`; the embedding's matrix where tied."""
        name = head_name(self._config)
        return self._read([name])[name]

    def _read(self, names: list[str]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in read_tensors(self._model_dir, names, self._dtype):
            tensors[name] = tensor
            self._loaded_bytes += tensor.nbytes
            self._progress(self._loaded_bytes, self._total_bytes)
        return tensors


def _layer_shapes(config: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, key_value_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {
        "q_proj": (query_size, hidden),
        "k_proj": (key_value_size, hidden),
        "v_proj": (key_value_size, hidden),
        "o_proj": (hidden, query_size),
    }
    feed_forward = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    for block, projections, has_bias in (
        ("self_attn", attention, config.attention_bias),
        ("mlp", feed_forward, config.mlp_bias),
    ):
        for name, shape in projections.items():
            shapes[f"{prefix}.{block}.{name}.weight"] = shape
            if has_bias:
                shapes[f"{prefix}.{block}.{name}.bias"] = shape[:1]
    if config.qk_norm:
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _fuse_layer(tensors: dict[str, torch.Tensor], prefix: str) -> LayerWeights:
    attention, feed_forward = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LayerWeights(
        input_norm=tensors[f"{prefix}.input_layernorm.weight"],
        qkv=_fuse(tensors, [f"{attention}.{name}_proj" for name in "qkv"]),
        query_norm=tensors.get(f"{attention}.q_norm.weight"),
        key_norm=tensors.get(f"{attention}.k_norm.weight"),
        output=_fuse(tensors, [f"{attention}.o_proj"]),
        feed_forward_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
        gate_up=_fuse(tensors, [f"{feed_forward}.gate_proj", f"{feed_forward}.up_proj"]),
        down=_fuse(tensors, [f"{feed_forward}.down_proj"]),
    )


def _fuse(tensors: dict[str, torch.Tensor], names: list[str]) -> Projection:
    weights = [tensors[f"{name}.weight"] for name in names]
    biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
    return Projection(weight=torch.cat(weights), bias=torch.cat(biases) if biases else None)
