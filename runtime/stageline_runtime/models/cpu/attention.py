"""Attention of a step's queries over the KV cache, for grouped-query heads, on CPU.

The query heads that share a key/value head are folded into the query length, so that each key is read once and never
repeated in memory. Single-token rows of consecutive slots attend in one call over a view of the cache; pieces of
prefill chunks attend one by one. The scores' scale is `1 / sqrt(head_dim)`.
"""

import torch
import torch.nn.functional as F

from stageline_runtime.models.cpu.attention_batch import AttentionBatch, DecodeRun, PrefillPiece


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """Attend all rows of a step over one layer's cache, which already holds the step's own keys and values.

    Args:
        query: `[padded_tokens, num_heads, head_dim]`.
        keys: `[num_slots, num_kv_heads, slot_tokens, head_dim]`.
        values: as `keys`.
        batch: the plan's rows.

    Returns:
        `[padded_tokens, num_heads * head_dim]`; zero for padding.
    """
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_zeros(num_tokens, num_heads * head_dim)
    for run in batch.decode:
        output[run.tokens] = _attend_run(query[run.tokens], keys, values, run)
    for piece in batch.prefill:
        output[piece.tokens] = _attend_piece(query[piece.tokens], keys, values, piece)
    return output


def _attend_run(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, run: DecodeRun) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    folded = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(
        folded, keys[run.slots, :, : run.context], values[run.slots, :, : run.context], attn_mask=run.mask
    )
    return attended.reshape(num_rows, num_heads * head_dim)


def _attend_piece(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, piece: PrefillPiece) -> torch.Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    folded = query.transpose(0, 1).reshape(1, num_kv_heads, group_size * num_tokens, head_dim)
    slot = slice(piece.slot, piece.slot + 1)
    attended = F.scaled_dot_product_attention(
        folded, keys[slot, :, : piece.context], values[slot, :, : piece.context], attn_mask=piece.mask
    )
    return attended.reshape(num_heads, num_tokens, head_dim).transpose(0, 1).reshape(num_tokens, num_heads * head_dim)
