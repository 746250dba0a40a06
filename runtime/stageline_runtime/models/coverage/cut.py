"""A Hugging Face model cut to one stage: which modules it keeps, and how one hidden tensor passes through them.

The model's own forward pass runs, so it prepares rotary tables, masks and other inputs of its layers itself. Layers of
other stages become `StageLayer`s that pass hidden states on. The first own layer gets the received tensor and the last
one's output is used, whatever the model does to hidden states before and after. `base_model_pp_plan` names the modules
before and after the layers.

The model is built on the meta device, which costs no memory, and only the stage's own tensors are read. Buffers that no
checkpoint holds (rotary frequencies, embedding scales) are computed by the model's own initialisation, into memory
marked beforehand, so that a missing computation is found. A tied tensor is read from the other's place only where the
checkpoint lacks it, as in transformers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from stageline_api.runtime_config import LayerRange
from stageline_runtime.models.coverage.attention import ATTENTION_NAME, CoverageError
from stageline_runtime.models.protocol import LoadProgress
from stageline_runtime.models.weights.checkpoint import check_shapes, read_tensors, tensor_names

_HIDDEN_DIMENSIONS = 3
_FROM_POSITIONS = frozenset({"position_ids", "cache_position", "position_embeddings"})


@dataclass(slots=True, kw_only=True)
class Passage:
    """Hidden states on their way through one call of the model: `[1, num_tokens, hidden_size]`."""

    embedding_only: bool
    hidden: torch.Tensor | None
    """Received from the previous stage; then the output of this part."""
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


Places = dict[str, list[tuple[nn.Module, str]]]
"""Owners and attributes by the tensor's name in the checkpoint."""
_BUILD_ERRORS = (ValueError, KeyError, TypeError, AttributeError, ImportError, OSError)


def load_cut(
    model_dir: Path,
    layer_range: LayerRange,
    *,
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype,
    progress: LoadProgress,
) -> ModelCut:
    """Build the model, cut it and read what the stage holds.

    Raises:
        CoverageError: transformers can't build it, or it can't be cut.
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    model = _build(model_dir)
    unchanged = getattr(model, "_keep_in_fp32_modules_strict", None) or getattr(model, "_keep_in_fp32_modules", None)
    if unchanged and dtype is not torch.float32:
        raise CoverageError(f"{type(model).__name__} keeps {sorted(unchanged)[0]} in float32: use dtype float32")
    stored = _stored_names(model, tensor_names(model_dir))
    cut = ModelCut(model, layer_range, is_first=is_first, is_last=is_last)
    modules: list[nn.Module] = [cut.base, model]
    for module in modules:
        _compute_buffers(model, module)
    places, shapes = _places(model, cut, stored)
    _read(model_dir, places, shapes, dtype, progress)
    _share_equal_copies(model, places)
    for module in modules:
        module.eval().requires_grad_(False)
    return cut


def held_tensors(model_dir: Path, layer_range: LayerRange, *, is_first: bool, is_last: bool) -> list[str]:
    """Names of the checkpoint's tensors that `load_cut` would read; of a checkpoint in shards, the index is enough.

    Raises:
        CoverageError: transformers can't build the model, or it can't be cut.
        WeightsError: the checkpoint is unreadable.
    """
    model = _build(model_dir)
    stored = _stored_names(model, tensor_names(model_dir))
    cut = ModelCut(model, layer_range, is_first=is_first, is_last=is_last)
    _, shapes = _places(model, cut, stored)
    return sorted(shapes)


def _build(model_dir: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_dir)
        with torch.device("meta"):
            return cast(Any, AutoModelForCausalLM).from_config(config, attn_implementation=ATTENTION_NAME)
    except _BUILD_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CoverageError(f"transformers can't build the model of {model_dir}/config.json: {reason}") from error


def _compute_buffers(model: Any, root: nn.Module) -> None:
    """Compute the buffers that checkpoints don't hold, in all modules that are left of `root`."""
    for name, module in root.named_modules():
        missing = [buffer for buffer in module._non_persistent_buffers_set if module._buffers[buffer] is not None]
        for buffer in missing:
            shape = module._buffers[buffer]
            assert shape is not None
            if not shape.is_floating_point():
                raise CoverageError(f"{type(model).__name__} has a buffer {name}.{buffer} that can't be computed")
            module._buffers[buffer] = torch.full_like(shape, float("nan"), device="cpu")
        if missing:
            with torch.no_grad():
                model._init_weights(module)
        for buffer in missing:
            if bool(torch.isnan(module.get_buffer(buffer)).any()):
                raise CoverageError(f"{type(model).__name__} doesn't compute its buffer {name}.{buffer}")


def _stored_names(model: Any, present: frozenset[str]) -> dict[str, str]:
    """By the whole model's own name of a tensor, the name that the checkpoint has for it.

    Old names and a prefix too many or too few are transformers' business: its own rules for the family are asked.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    own = dict.fromkeys(model.state_dict(), True)
    renamed = {
        rename_source_key(name, rules, [], model.base_model_prefix, own)[0]: name
        for name in sorted(present - own.keys())
    }
    return renamed | {name: name for name in present & own.keys()}


def _places(model: Any, cut: ModelCut, stored: dict[str, str]) -> tuple[Places, dict[str, tuple[int, ...]]]:
    """Where each tensor of the checkpoint goes, and its shape.

    Its module names it; where no such name is `stored`, the module that it is tied to.
    """
    places: Places = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied = _tied_names(model)
    for name, owner, attribute, tensor in _tensors(cut):
        source = stored.get(name) or stored.get(tied.get(name, name), name)
        places.setdefault(source, []).append((owner, attribute))
        shapes[source] = tuple(tensor.shape)
    return places, shapes


def _tied_names(model: Any) -> dict[str, str]:
    """Names of tensors that the model ties, and those that they are tied to."""
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else None
    return tied if isinstance(tied, dict) else {}


def _read(
    model_dir: Path, places: Places, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, progress: LoadProgress
) -> None:
    check_shapes(model_dir, shapes)
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    loaded = 0
    for source, tensor in read_tensors(model_dir, shapes, dtype):
        for owner, attribute in places[source]:
            if attribute in owner._parameters:
                owner._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
            else:
                owner._buffers[attribute] = tensor
        loaded += tensor.nbytes
        progress(loaded, total)


def _share_equal_copies(model: Any, places: Places) -> None:
    """Hold a tied tensor once where the checkpoint has the same values under both names."""
    for name, source in _tied_names(model).items():
        if name not in places or source not in places:
            continue
        (owner, attribute), *_ = places[source]
        shared = getattr(owner, attribute)
        for copy_owner, copy_attribute in places[name]:
            if torch.equal(shared, getattr(copy_owner, copy_attribute)):
                setattr(copy_owner, copy_attribute, shared)


def _tensors(cut: ModelCut) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Name in the checkpoint, owner, attribute and meta tensor of each parameter and persistent buffer kept."""
    for prefix, kept in cut.kept.items():
        for path, owner in kept.named_modules():
            held = {**owner._parameters, **owner._buffers}
            for attribute, tensor in held.items():
                if tensor is not None and attribute not in owner._non_persistent_buffers_set:
                    yield ".".join(part for part in (prefix, path, attribute) if part), owner, attribute, tensor
