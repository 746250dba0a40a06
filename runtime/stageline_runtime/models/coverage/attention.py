"""Attention of Hugging Face's layers over the slot cache, through the hooks that transformers has for it.

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
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from stageline_runtime.models.cpu.kv_cache import AttentionBatch, KvCache
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

    batch: AttentionBatch
    cache: KvCache
    first_layer: int
    calls: list[int] = field(default_factory=list)
    """Layers whose attention ran, in order."""
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
    expected = (1, step.cache.keys[layer].shape[1], query.shape[2], step.cache.keys[layer].shape[3])
    for name, given in (("keys", key), ("values", value)):
        if tuple(given.shape) != expected:
            raise CoverageError(
                f"{type(module).__name__} of layer {module.layer_idx} has {name} of {given.shape[1]} heads of size "
                f"{given.shape[3]}; config.json says {expected[1]} heads of size {expected[3]}"
            )
    step.calls.append(module.layer_idx)
    step.cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), step.batch)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return _attend(query[0].transpose(0, 1), layer, step, attention_mask, scale, softcap)[None], None


def _attend(
    query: torch.Tensor, layer: int, step: CoveredStep, mask: SlotMask, scale: float, softcap: float | None
) -> torch.Tensor:
    """Map queries `[num_tokens, num_heads, head_dim]` to the same shape; zero for padding."""
    output = torch.zeros_like(query)
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    for index, piece in enumerate(step.batch.prefill):
        slots, context = slice(piece.slot, piece.slot + 1), piece.context
        visible = _visible(step, mask, index, piece.tokens, context)[None]
        rows = query[None, piece.tokens]
        attended = _softmax(rows, keys[slots, :, :context], values[slots, :, :context], visible, scale, softcap)
        output[piece.tokens] = attended[0]
    for index, run in enumerate(step.batch.decode, start=len(step.batch.prefill)):
        context = run.context
        visible = _visible(step, mask, index, run.tokens, context)[:, None]
        rows = query[run.tokens][:, None]
        attended = _softmax(rows, keys[run.slots, :, :context], values[run.slots, :, :context], visible, scale, softcap)
        output[run.tokens] = attended[:, 0]
    return output


def _visible(step: CoveredStep, mask: SlotMask, row: int, tokens: slice | torch.Tensor, context: int) -> torch.Tensor:
    """Which of `context` positions each of the row's tokens sees: `[num_tokens, context]`."""
    kept = step.masks.get((id(mask), row))
    if kept is None:
        zero = torch.zeros((), dtype=torch.int64)
        queries, keys = step.batch.positions[tokens][:, None], torch.arange(context)[None, :]
        kept = mask.sees(zero, zero, queries, keys).expand(queries.shape[0], context)
        step.masks[id(mask), row] = kept
    return kept


def _softmax(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attend `[rows, num_tokens, num_heads, head_dim]` over `[rows, num_kv_heads, context, head_dim]` of the cache.

    `visible` is `[rows, num_tokens, context]`. Query heads of a key/value head are folded into the query length.
    """
    num_rows, num_tokens, num_heads, head_dim = query.shape
    group_size = num_heads // keys.shape[1]
    folded = query.transpose(1, 2).reshape(num_rows, keys.shape[1], group_size * num_tokens, head_dim)
    allowed = visible[:, None].repeat(1, 1, group_size, 1)
    if softcap is None:
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=allowed, scale=scale)
    else:
        scores = torch.tanh(folded @ keys.transpose(2, 3) * scale / softcap) * softcap
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        attended = F.softmax(scores, dim=-1, dtype=torch.float32).to(folded.dtype) @ values
    return attended.reshape(num_rows, num_heads, num_tokens, head_dim).transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, slot_attention)
AttentionMaskInterface.register(ATTENTION_NAME, slot_mask)
