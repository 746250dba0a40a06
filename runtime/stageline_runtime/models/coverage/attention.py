"""Attention of Hugging Face's layers over the paged cache, through the hooks that transformers has for it.

A layer calls the registered function with the step's queries, keys and values; it writes them to the layer's cache and
attends row by row, as the own decoder does. Which positions a query sees is asked of the mask function that the model
itself composed, at the plan's positions: windows need no code here. An argument that changes the result and isn't known
is refused, never ignored.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from stageline_runtime.models.layers.attention import attend_row, rows_of, store
from stageline_runtime.models.layers.kv_cache import LayerCache
from stageline_runtime.models.layers.step_batch import StepTensors
from stageline_runtime.models.weights.checkpoint import WeightsError

ATTENTION_NAME = "stageline_slots"
_HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "sliding_window", "use_cache", "output_attentions"})
"""Arguments that say nothing here: dropout is off, and the masks already hold windows and causality."""

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query position, key position) -> whether the query sees the key; shapes broadcast."""


class CoverageError(WeightsError):
    """Hugging Face's layers can't be run exactly; the message names the model and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMask:
    """Stands for a mask tensor on its way through the model's own code."""

    sees: MaskFunction


@dataclass(slots=True, kw_only=True)
class CoveredStep:
    """The plan that layers are run for, and the cache they write."""

    step: StepTensors
    caches: tuple[LayerCache, ...]
    first_layer: int
    calls: list[int] = field(default_factory=list)
    """Layers that ran attention, in order."""
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """By mask (its id) and row: worked out for the first layer, kept for the others."""


CURRENT_STEP: ContextVar[CoveredStep] = ContextVar("CURRENT_STEP")


def slot_mask(*, mask_function: MaskFunction, **_shape: Any) -> SlotMask:
    """What models get where they ask for an attention mask."""
    return SlotMask(sees=mask_function)


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend queries `[1, num_heads, num_tokens, head_dim]`; keys and values have `num_kv_heads`.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no weights.

    Raises:
        CoverageError: the layer asks for something that isn't built.
    """
    step = CURRENT_STEP.get()
    layer = module.layer_idx - step.first_layer
    unknown = sorted(name for name, given in arguments.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise CoverageError(f"{type(module).__name__} gives attention {unknown[0]}, which is not supported")
    if not isinstance(attention_mask, SlotMask):
        raise CoverageError(f"{type(module).__name__} makes its own attention masks, which is not supported")
    _, num_kv_heads, _, head_dim = step.caches[layer][0].shape
    expected = (1, num_kv_heads, query.shape[2], head_dim)
    for name, given in (("keys", key), ("values", value)):
        if tuple(given.shape) != expected:
            raise CoverageError(
                f"{type(module).__name__} of layer {module.layer_idx} has {name} of {given.shape[1]} heads of size "
                f"{given.shape[3]}; config.json says {expected[1]} heads of size {expected[3]}"
            )
    step.calls.append(module.layer_idx)
    store(key[0].transpose(0, 1), value[0].transpose(0, 1), step.caches[layer], step.step)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return _attend(query[0].transpose(0, 1), layer, step, attention_mask, scale, softcap)[None], None


def _attend(
    query: torch.Tensor, layer: int, step: CoveredStep, mask: SlotMask, scale: float, softcap: float | None
) -> torch.Tensor:
    """Map queries `[num_tokens, num_heads, head_dim]` to the same shape; zero for padding."""
    output = torch.zeros_like(query)
    for index, row in enumerate(rows_of(step.step)):
        visible = step.masks.get((id(mask), index))
        if visible is None:
            zero = torch.zeros((), dtype=torch.int64)
            visible = mask.sees(zero, zero, row.positions[:, None], torch.arange(row.end)[None, :])
            step.masks[id(mask), index] = visible = visible.expand(len(row.positions), row.end)
        keys, values = row.content(step.caches[layer], step.step)
        output[row.tokens] = attend_row(query[row.tokens], keys, values, visible, scale, softcap)
    return output


AttentionInterface.register(ATTENTION_NAME, slot_attention)
AttentionMaskInterface.register(ATTENTION_NAME, slot_mask)
