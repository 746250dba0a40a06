"""A Hugging Face model cut to one stage: which modules it keeps, and how one hidden tensor passes through the rest.

The model's own forward pass runs, so that rotary tables, masks and what else it prepares for its layers are its own.
Layers of other stages become `StageLayer`s that pass hidden states on; the first own layer takes what was received and
the last one's output is taken, whatever the model does to hidden states before and after. Which modules come before
and after the layers is what `base_model_pp_plan` says.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stageline_api.runtime_config import LayerRange
from stageline_runtime.models.coverage.attention import CoverageError

_HIDDEN_DIMENSIONS = 3
_FROM_POSITIONS = frozenset({"position_ids", "cache_position", "position_embeddings"})


@dataclass(slots=True, kw_only=True)
class Passage:
    """Hidden states on their way through one call of the model: `[1, num_tokens, hidden_size]`."""

    embedding_only: bool
    hidden: torch.Tensor | None
    """Received from the stage before; then what comes out of this part."""
    layer_outputs: list[torch.Tensor] = field(default_factory=list)


class StageLayer(nn.Module):
    """Stands where the model has a layer; `layer` is None where another stage runs it."""

    def __init__(self, cut: "ModelCut", index: int, layer: nn.Module | None) -> None:
        super().__init__()
        self.layer = layer
        self.attention_type = getattr(layer, "attention_type", None)
        self._index = index
        self._cut = [cut]  # in a list, or the model would become its own submodule's attribute

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        """Pass hidden states on, or run the layer on them."""
        (cut,) = self._cut
        return cut.at_layer(self._index, self.layer, hidden_states, arguments, named)


class PassOn(nn.Module):
    """Stands for a module that this call doesn't need."""

    def forward(self, rows: torch.Tensor, *_arguments: Any, **_named: Any) -> torch.Tensor:
        """The rows as they are."""
        return rows


class LastHidden(nn.Module):
    """Stands for the layers when only the head runs, so that what the model does to its logits is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: torch.Tensor | None = None

    def forward(self, *_arguments: Any, **_named: Any) -> Any:
        """The rows that were put here, as the model's last hidden state."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.rows)


class ModelCut:
    """The parts of `model` that one stage runs. Parameters are still on the meta device."""

    def __init__(self, model: Any, layer_range: LayerRange, *, is_first: bool, is_last: bool) -> None:
        self.model = model
        self.base = model.base_model
        self.is_first, self.is_last = is_first, is_last
        self._range = layer_range
        self.passage = Passage(embedding_only=False, hidden=None)
        front, layers_name, tail = _plan(model, self.base)
        self.prefix = model.base_model_prefix
        self.kept: dict[str, nn.Module] = {}
        """Modules that hold weights of this stage, by their name in the checkpoint."""
        if is_first:
            self.kept |= {f"{self.prefix}.{name}": getattr(self.base, name) for name in front}
        layers = getattr(self.base, layers_name)
        for index in range(layer_range.first, layer_range.last + 1):
            self.kept[f"{self.prefix}.{layers_name}.{index}"] = layers[index]
        if is_last:
            self.kept |= {f"{self.prefix}.{name}": getattr(self.base, name) for name in tail}
            self.kept |= {name: child for name, child in model.named_children() if child is not self.base}
        self.tail = [getattr(self.base, name) for name in tail] if is_last else []
        self._replace(front if not is_first else [], layers_name, tail)
        self.last_hidden = LastHidden()
        setattr(model, self.prefix, self.last_hidden)

    def at_layer(
        self, index: int, layer: nn.Module | None, hidden: torch.Tensor, arguments: Any, named: dict[str, Any]
    ) -> torch.Tensor:
        """What happens where the model calls layer `index`."""
        passage = self.passage
        if passage.embedding_only:
            if index == 0:
                _check_sole_input(hidden, arguments, named)
                passage.hidden = hidden
            return hidden
        if layer is None:
            return hidden
        if index == self._range.first:
            assert passage.hidden is not None, "layers without hidden states"
            hidden = passage.hidden
            _check_sole_input(hidden, arguments, named)
        result = layer(hidden, *arguments, **named)
        if not isinstance(result, torch.Tensor) or result.shape != hidden.shape:
            raise CoverageError(f"{type(layer).__name__} gives other than one hidden tensor, which is not supported")
        passage.layer_outputs.append(result)
        return result

    def _replace(self, front: list[str], layers_name: str, tail: list[str]) -> None:
        layers = getattr(self.base, layers_name)
        here = range(self._range.first, self._range.last + 1)
        slots = [StageLayer(self, index, layer if index in here else None) for index, layer in enumerate(layers)]
        for slot, layer in zip(slots, layers, strict=True):
            slot.attention_type = getattr(layer, "attention_type", None)
        setattr(self.base, layers_name, nn.ModuleList(slots))
        for name in (*front, *tail):
            setattr(self.base, name, PassOn())


def _check_sole_input(hidden: torch.Tensor, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse layers that are given tensors, beside hidden states, which a later stage couldn't work out itself."""
    if hidden.dim() != _HIDDEN_DIMENSIONS or hidden.shape[0] != 1:
        raise CoverageError(f"layers take hidden states of shape {list(hidden.shape)}, not one [1, num_tokens, size]")
    others = [name for name, given in named.items() if isinstance(given, torch.Tensor) and name not in _FROM_POSITIONS]
    others += [f"argument {at}" for at, given in enumerate(arguments, start=1) if isinstance(given, torch.Tensor)]
    if others:
        raise CoverageError(f"layers take {others[0]} beside hidden states, which is not supported")


def _plan(model: Any, base: Any) -> tuple[list[str], str, list[str]]:
    """Names of the modules before the layers, of the layers, and of the modules after them."""
    family = model.config.model_type
    plan = getattr(type(base.config), "base_model_pp_plan", None)
    if not plan:
        raise CoverageError(f"model_type {family!r} is not supported: transformers has no base_model_pp_plan for it")
    names = [name for name in plan if hasattr(base, name)]
    layers = [name for name in names if isinstance(getattr(base, name), nn.ModuleList)]
    if len(layers) != 1:
        raise CoverageError(f"model_type {family!r} is not supported: its plan names {len(layers)} lists of layers")
    for name, child in base.named_children():
        if name not in names and next(child.parameters(), None) is not None:
            raise CoverageError(f"model_type {family!r} is not supported: its {name} is in no stage of its plan")
    at = names.index(layers[0])
    return names[:at], layers[0], names[at + 1 :]
