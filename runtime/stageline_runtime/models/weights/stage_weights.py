"""One stage's weights, read by tensor name: the layers it holds and, at the ends, embedding, final norm and head.

A stage never reads a tensor of another stage. With tied embeddings the first and the last stage both read the matrix.
A checkpoint that holds a head though `config.json` says that it is tied means that head, as in transformers: it is
read in place of the embedding, so that no stage has to compare the two. Missing and misshapen tensors are found from
the headers before any data is read.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.expert_cut import ExpertCut
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.rank_cut import RankCut, TensorSlice
from stageline_runtime.models.protocol import CPU, LoadProgress, StageShape
from stageline_runtime.models.weights.checkpoint import check_shapes, read_tensors, tensor_names
from stageline_runtime.models.weights.layer_weights import (
    DenseWeights,
    ExpertForm,
    ExpertWeights,
    LayerWeights,
    Projection,
    fuse_layer,
    layer_file_shapes,
)

__all__ = [
    "CheckpointForm",
    "DenseWeights",
    "ExpertForm",
    "ExpertWeights",
    "LayerWeights",
    "Projection",
    "StageWeights",
    "checkpoint_form",
    "stage_tensor_shapes",
    "stage_weight_bytes",
]


_PREFIX = "model."
_EMBEDDING_NAME = "embed_tokens.weight"
_FINAL_NORM_NAME = "norm.weight"
_HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointForm:
    """What `config.json` doesn't tell of the names in a checkpoint."""

    experts: ExpertForm = ExpertForm.STACKED
    has_head: bool = False
    """Whether it holds a head; one that is tied need not be there."""
    prefix: str = _PREFIX
    """Of all names but the head's; none in a checkpoint of the bare decoder."""


def stage_tensor_shapes(
    config: ModelConfig,
    layer_range: LayerRange,
    form: CheckpointForm = CheckpointForm(),
    *,
    has_embedding: bool,
    has_head: bool,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors a stage needs, as a checkpoint of `form` names them."""
    shapes: dict[str, tuple[int, ...]] = {}
    vocabulary = (config.vocab_size, config.hidden_size)
    if has_embedding:
        shapes[form.prefix + _EMBEDDING_NAME] = vocabulary
    for layer in range(layer_range.first, layer_range.last + 1):
        prefix = _layer_prefix(form, layer)
        shapes |= {prefix + name: shape for name, shape in layer_file_shapes(config, layer, form.experts).items()}
    if has_head:
        shapes[form.prefix + _FINAL_NORM_NAME] = (config.hidden_size,)
        shapes[head_name(config, form)] = vocabulary
    return shapes


def checkpoint_form(model_dir: Path) -> CheckpointForm:
    """How the checkpoint names experts, where it has any, and whether it holds a head.

    Raises:
        WeightsError: the checkpoint is unreadable.
    """
    names = tensor_names(model_dir)
    forms = (form for form in ExpertForm if any(form.value in name for name in names))
    prefix = "" if _EMBEDDING_NAME in names else _PREFIX
    return CheckpointForm(experts=next(forms, ExpertForm.SEPARATE), has_head=_HEAD_NAME in names, prefix=prefix)


def _layer_prefix(form: CheckpointForm, layer: int) -> str:
    return f"{form.prefix}layers.{layer}."


def head_name(config: ModelConfig, form: CheckpointForm) -> str:
    """Name of the tensor that the head multiplies with."""
    return form.prefix + _EMBEDDING_NAME if config.tie_word_embeddings and not form.has_head else _HEAD_NAME


def stage_weight_bytes(
    model_dir: Path,
    config: ModelConfig,
    layer_range: LayerRange,
    *,
    has_embedding: bool,
    has_head: bool,
    dtype: torch.dtype,
    cut: RankCut | ExpertCut | None = None,
) -> int:
    """Bytes of the stage's tensors as `dtype`, or of its rank's part of them, which is where `progress` ends; reads
    file headers only.

    Raises:
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    form = checkpoint_form(model_dir)
    shapes = stage_tensor_shapes(config, layer_range, form, has_embedding=has_embedding, has_head=has_head)
    check_shapes(model_dir, shapes)
    part = _RankReads(config, form, shapes, cut, has_embedding=has_embedding)
    return part.num_elements * dtype.itemsize


class _RankReads:
    """Which of a stage's tensors a rank reads, and which part of each."""

    def __init__(
        self,
        config: ModelConfig,
        form: CheckpointForm,
        shapes: dict[str, tuple[int, ...]],
        cut: RankCut | ExpertCut | None,
        *,
        has_embedding: bool,
    ) -> None:
        self._cut = None if cut is None or cut.ranks == 1 else cut
        self.slices: dict[str, TensorSlice] = {}
        read = dict(shapes)
        for name, shape in shapes.items():
            if not self.holds(name):
                del read[name]
            elif (part := self._slice_of(name, shape, form, config, has_embedding=has_embedding)) is not None:
                self.slices[name] = part
                read[name] = part.shape_of(shape)
        self.num_elements = sum(math.prod(shape) for shape in read.values())

    def holds(self, name: str) -> bool:
        return self._cut is None or self._cut.holds(_within_layer(name))

    def _slice_of(
        self, name: str, shape: tuple[int, ...], form: CheckpointForm, config: ModelConfig, *, has_embedding: bool
    ) -> TensorSlice | None:
        if self._cut is None:
            return None
        if name == form.prefix + _EMBEDDING_NAME and has_embedding:
            return None
        if name == head_name(config, form):
            return self._cut.vocabulary
        return self._cut.slice_of(_within_layer(name), shape)


def _within_layer(name: str) -> str:
    """`self_attn.q_proj.weight` of `model.layers.7.self_attn.q_proj.weight`; other names as they are."""
    _, found, rest = name.partition("layers.")
    return rest.partition(".")[2] if found else name


class StageWeights:
    """The stage's tensors in one dtype, read when asked for, so that never more than one layer is held twice.

    Raises:
        WeightsError: a tensor is missing or misshapen, or a file is unreadable; found here, from the headers.
    """

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        shape: StageShape,
        progress: LoadProgress,
        device: torch.device = CPU,
        cut: RankCut | ExpertCut | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._config = config
        self._layer_range = shape.layers
        self._form = checkpoint_form(model_dir)
        self._shapes = stage_tensor_shapes(
            config, shape.layers, self._form, has_embedding=shape.is_first, has_head=shape.is_last
        )
        self._dtype = shape.dtype
        self._device = device
        self._progress = progress
        check_shapes(model_dir, self._shapes)
        self._loaded_bytes = 0
        self._cut = cut
        self._part = _RankReads(config, self._form, self._shapes, cut, has_embedding=shape.is_first)
        self._total_bytes = self._part.num_elements * self._dtype.itemsize

    def embedding(self) -> torch.Tensor:
        """`[vocab_size, hidden_size]`."""
        return self._one(self._form.prefix + _EMBEDDING_NAME)

    def layers(self) -> Iterator[LayerWeights]:
        for layer in range(self._layer_range.first, self._layer_range.last + 1):
            prefix = _layer_prefix(self._form, layer)
            names = [prefix + name for name in layer_file_shapes(self._config, layer, self._form.experts)]
            named = self._read([name for name in names if self._part.holds(name)])
            tensors = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
            named.clear()
            experts = self._cut.experts if isinstance(self._cut, ExpertCut) else None
            yield fuse_layer(self._config, layer, self._form.experts, tensors, experts)

    def final_norm(self) -> torch.Tensor:
        """`[hidden_size]`."""
        return self._one(self._form.prefix + _FINAL_NORM_NAME)

    def head(self, embedding: torch.Tensor | None) -> torch.Tensor:
        """`[vocab_size, hidden_size]`, or the rank's rows; where tied, those of the stage's `embedding` if it has one,
        also for an equal copy."""
        rows = None if self._cut is None or self._cut.ranks == 1 else self._cut.vocabulary
        if embedding is not None and rows is not None:
            embedding = embedding[rows.start : rows.stop]
        name = head_name(self._config, self._form)
        if embedding is not None and name != _HEAD_NAME:
            return embedding
        head = self._one(name)
        if embedding is not None and self._config.tie_word_embeddings and torch.equal(head, embedding):
            return embedding
        return head

    def _one(self, name: str) -> torch.Tensor:
        return self._read([name])[name]

    def _read(self, names: list[str]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in read_tensors(self._model_dir, names, self._dtype, self._part.slices):
            tensors[name] = tensor.to(self._device)
            self._loaded_bytes += tensor.nbytes
            self._progress(self._loaded_bytes, self._total_bytes)
        return tensors
