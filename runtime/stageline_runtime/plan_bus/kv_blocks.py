"""The unit that KV cache is counted in: engine and stages agree on it, whatever a stage's memory looks like. Pure."""

BLOCK_TOKENS = 16
"""Tokens of one block, in all layers of all stages."""


def blocks_of(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens of one slot."""
    return -(-num_tokens // BLOCK_TOKENS)
