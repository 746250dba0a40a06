"""Fills the kept modules of a cut model with the stage's own tensors, and nothing else of the checkpoint.

The model is built on the meta device, which costs no memory. Buffers that no checkpoint holds (rotary frequencies,
embedding scales) are computed by the model's own initialisation, into memory marked beforehand, so that one which
wasn't computed is found. A tensor that is tied to another is read from the other's place only where the checkpoint
lacks it, as in transformers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from stageline_api.runtime_config import LayerRange
from stageline_runtime.models.coverage.attention import ATTENTION_NAME, CoverageError
from stageline_runtime.models.coverage.cut import ModelCut
from stageline_runtime.models.weights.checkpoint import check_shapes, read_tensors, tensor_names
from stageline_runtime.models.weights.stage_weights import Progress

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
    progress: Progress,
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
    cut = ModelCut(model, layer_range, is_first=is_first, is_last=is_last)
    modules: list[nn.Module] = [cut.base, model]
    for module in modules:
        _compute_buffers(model, module)
    places, shapes = _places(model, cut, tensor_names(model_dir))
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
    cut = ModelCut(model, layer_range, is_first=is_first, is_last=is_last)
    _, shapes = _places(model, cut, tensor_names(model_dir))
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


def _places(model: Any, cut: ModelCut, present: frozenset[str]) -> tuple[Places, dict[str, tuple[int, ...]]]:
    """Where each tensor of the checkpoint goes, and its shape.

    Its module names it; where that name isn't `present`, the module that it is tied to.
    """
    places: Places = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied = _tied_names(model)
    for name, owner, attribute, tensor in _tensors(cut):
        source = name if name in present else tied.get(name, name)
        places.setdefault(source, []).append((owner, attribute))
        shapes[source] = tuple(tensor.shape)
    return places, shapes


def _tied_names(model: Any) -> dict[str, str]:
    """Names of tensors that the model ties, and those that they are tied to."""
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else None
    return tied if isinstance(tied, dict) else {}


def _read(
    model_dir: Path, places: Places, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, progress: Progress
) -> None:
    """Read the tensors of the kept modules."""
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
