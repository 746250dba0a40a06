"""One stage's weights, read by tensor name: the layers it holds and, at the ends, embedding, final norm and head.

A stage never reads a tensor of another stage. With tied embeddings the first and the last stage both read the matrix.
A checkpoint that holds a head though `config.json` says that it is tied means that head, as in transformers: it is
read in place of the embedding, so that no stage has to compare the two. Missing and misshapen tensors are found from
the headers before any data is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.families.registry import layer_of
from stageline_runtime.model_facts.layer import Cut, Mixture, Tensor
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.rank_cut import RankCut
from stageline_runtime.models.protocol import CPU, LoadProgress, StageShape
from stageline_runtime.models.weights.checkpoint import check_shapes, read_tensors, tensor_names
from stageline_runtime.models.weights.layer_weights import (
    DenseWeights,
    ExpertWeights,
    LayerWeights,
)

__all__ = [
    "CheckpointForm",
    "DenseWeights",
    "ExpertWeights",
    "LayerWeights",
    "StageWeights",
    "checkpoint_form",
    "stage_tensors",
]


_PREFIX = "model."
_EMBEDDING_NAME = "embed_tokens.weight"
_FINAL_NORM_NAME = "norm.weight"
_HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointForm:
    """Properties of the names in a checkpoint that `config.json` doesn't hold."""

    has_stacked_experts: bool = True
    """Whether a layer's experts are one tensor; otherwise each has its own."""
    has_head: bool = False
    """Whether it holds a head; one that is tied need not be there."""
    prefix: str = _PREFIX
    """Of all names but the head's; none in a checkpoint of the bare decoder."""

    def layer_prefix(self, layer: int) -> str:
        return f"{self.prefix}layers.{layer}."


def stage_tensors(
    config: ModelConfig,
    layer_range: LayerRange,
    form: CheckpointForm = CheckpointForm(),
    *,
    has_embedding: bool,
    has_head: bool,
) -> dict[str, Tensor]:
    """The tensors a stage needs by name, as a checkpoint of `form` names them."""
    tensors: list[Tensor] = []
    vocabulary = (config.vocab_size, config.hidden_size)
    if has_embedding:
        tensors.append(Tensor(form.prefix + _EMBEDDING_NAME, vocabulary))
    for layer in range(layer_range.first, layer_range.last + 1):
        prefix = form.layer_prefix(layer)
        for tensor in layer_of(config, layer).tensors(is_stacked=form.has_stacked_experts):
            tensors.append(replace(tensor, name=prefix + tensor.name))
    if has_head:
        tensors.append(Tensor(form.prefix + _FINAL_NORM_NAME, (config.hidden_size,)))
        head = head_name(config, form)
        if not has_embedding or head == _HEAD_NAME:
            tensors.append(Tensor(head, vocabulary, Cut.BY_VOCABULARY))
    return {tensor.name: tensor for tensor in tensors}


def checkpoint_form(model_dir: Path) -> CheckpointForm:
    """How the checkpoint names experts, where it has any, and whether it holds a head.

    Raises:
        WeightsError: the checkpoint is unreadable.
    """
    names = tensor_names(model_dir)
    return CheckpointForm(
        has_stacked_experts=any(name.endswith(f".{Mixture.gate_up}") for name in names),
        has_head=_HEAD_NAME in names,
        prefix="" if _EMBEDDING_NAME in names else _PREFIX,
    )


def head_name(config: ModelConfig, form: CheckpointForm) -> str:
    """Name of the tensor that the head multiplies with."""
    return form.prefix + _EMBEDDING_NAME if config.tie_word_embeddings and not form.has_head else _HEAD_NAME


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
        cut: RankCut | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._config = config
        self._layer_range = shape.layers
        self._form = checkpoint_form(model_dir)
        self._cut = cut or RankCut(whole=config)
        ends = {"has_embedding": shape.is_first, "has_head": shape.is_last}
        tensors = stage_tensors(config, shape.layers, self._form, **ends)
        check_shapes(model_dir, {name: tensor.shape for name, tensor in tensors.items()})
        self._held = self._cut.held(tensors.values())
        self._dtype = shape.dtype
        self._device = device
        self._progress = progress
        self._loaded_bytes = 0
        self._total_bytes = self._cut.num_elements(tensors.values()) * self._dtype.itemsize

    def embedding(self) -> torch.Tensor:
        """`[vocab_size, hidden_size]`."""
        return self._one(self._form.prefix + _EMBEDDING_NAME)

    def layers(self) -> Iterator[LayerWeights]:
        is_stacked = self._form.has_stacked_experts
        for index in range(self._layer_range.first, self._layer_range.last + 1):
            prefix, layer = self._form.layer_prefix(index), layer_of(self._cut.part, index)
            named = self._read([name for name in self._held if name.startswith(prefix)])
            tensors = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
            named.clear()
            yield LayerWeights(layer, tensors, is_stacked=is_stacked, experts=self._cut.experts)

    def final_norm(self) -> torch.Tensor:
        """`[hidden_size]`."""
        return self._one(self._form.prefix + _FINAL_NORM_NAME)

    def head(self, embedding: torch.Tensor | None) -> torch.Tensor:
        """`[vocab_size, hidden_size]`, or the rank's rows; where tied, those of the stage's `embedding` if it has one,
        also for an equal copy."""
        if embedding is not None and self._cut.ranks > 1:
            rows = self._cut.vocabulary
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
        for name, tensor in read_tensors(self._model_dir, names, self._dtype, self._held):
            tensors[name] = tensor.to(self._device)
            self._loaded_bytes += tensor.nbytes
            self._progress(self._loaded_bytes, self._total_bytes)
        return tensors
