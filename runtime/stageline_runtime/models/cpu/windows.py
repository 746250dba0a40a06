"""Attention windows: layers whose queries see only the last so many positions, as a narrower mask over the same cache.

A window of `w` shows a query the positions above its own minus `w`, itself included. The cache keeps every position,
so that layers with and without a window share one plan of indices.
"""

from dataclasses import replace

import torch

from stageline_runtime.models.cpu.attention_batch import AttentionBatch


def narrow(batch: AttentionBatch, window: int) -> AttentionBatch:
    """The same batch for layers with a window of `window` positions."""
    return replace(
        batch,
        prefill=tuple(
            replace(piece, mask=_narrow_mask(piece.mask, batch.positions[piece.tokens], window))
            for piece in batch.prefill
        ),
        decode=tuple(
            replace(run, mask=_narrow_mask(run.mask, batch.positions[run.tokens], window)) for run in batch.decode
        ),
    )


def _narrow_mask(mask: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """Close what lies before the windows of queries at `positions` `[num_queries]`; a mask may repeat them by group."""
    context = mask.shape[-1]
    too_old = torch.arange(context)[None, :] <= positions[:, None] - window
    queries = mask.numel() // context
    return mask.masked_fill(too_old.repeat(queries // len(positions), 1).view(mask.shape), float("-inf"))
