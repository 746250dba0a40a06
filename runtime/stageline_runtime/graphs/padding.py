"""How many tokens a plan is padded to, and so which sizes a capture has to provide for. Pure."""


def padded_size(num_tokens: int) -> int:
    """Rows a plan is padded to: few distinct sizes, so that shapes (and rounding) repeat. 1, 2, 4, then eights."""
    for size in (1, 2, 4):
        if num_tokens <= size:
            return size
    return (num_tokens + 7) // 8 * 8


def decode_sizes(slots_per_cohort: int) -> tuple[int, ...]:
    """All sizes that plans of up to `slots_per_cohort` single-token rows are padded to."""
    return tuple(sorted({padded_size(rows) for rows in range(1, slots_per_cohort + 1)}))
