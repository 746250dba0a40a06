"""A plan's rows as the device's kernels read them: one small table of integers, sent in one copy. Pure.

The table's parts are found by position: tokens first, then tiles of single-token rows and padding, then tiles of
prefill chunks. Where a plan has nothing but single-token rows, tile `i` is token `i`: the table's layout then depends
on the padded size alone, which is what a captured graph needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stageline_runtime.plan_bus.messages import GraphMode, PlanRow

PADDING_SLOT = -1
Token = tuple[int, int]
"""Slot and position."""
Tile = tuple[int, int, int, int]
"""First token, number of tokens, slot, position of the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBounds:
    """What rows are checked against, and how many tokens a prefill tile takes."""

    num_slots: int
    slot_tokens: int
    tile_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one plan, for tokens `[padded_tokens]` and tiles."""

    tokens: tuple[Token, ...]
    decode_tiles: tuple[Tile, ...]
    """Single-token rows and padding, in token order."""
    prefill_tiles: tuple[Tile, ...]
    graph_mode: GraphMode
    written: tuple[tuple[int, int], ...]
    """(slot, end position) of each row."""

    @classmethod
    def padding(cls, num_tokens: int, graph_mode: GraphMode) -> "StepRows":
        """The table of a plan of nothing but padding."""
        return cls(tokens=(), decode_tiles=(), prefill_tiles=(), graph_mode=graph_mode, written=()).padded_to(
            num_tokens
        )

    def with_padding_tile(self) -> "StepRows":
        """The same with a prefill tile that computes nothing."""
        return replace(self, prefill_tiles=(*self.prefill_tiles, (0, 1, PADDING_SLOT, 0)))

    @property
    def padded_tokens(self) -> int:
        """Tokens of the plan with its padding."""
        return len(self.tokens)

    def padded_to(self, num_tokens: int) -> "StepRows":
        """The same rows with more padding, for a graph captured for `num_tokens`."""
        extra = range(self.padded_tokens, num_tokens)
        return StepRows(
            tokens=self.tokens + ((PADDING_SLOT, 0),) * len(extra),
            decode_tiles=self.decode_tiles + tuple((token, 1, PADDING_SLOT, 0) for token in extra),
            prefill_tiles=self.prefill_tiles,
            graph_mode=self.graph_mode,
            written=self.written,
        )

    def flat(self) -> list[int]:
        """All integers of the table in order."""
        parts: tuple[Sequence[tuple[int, ...]], ...] = (self.tokens, self.decode_tiles, self.prefill_tiles)
        return [number for part in parts for entry in part for number in entry]


def build_step_rows(
    rows: Sequence[PlanRow], padded_tokens: int, bounds: CacheBounds, graph_mode: GraphMode = GraphMode.OFF
) -> StepRows:
    """Work out the table of a plan.

    Raises:
        ValueError: a row lies outside the cache or the rows don't fit `padded_tokens`; a bug in whoever planned it.
    """
    tokens: list[Token] = []
    decode: list[Tile] = []
    prefill: list[Tile] = []
    for row in rows:
        _check_row(row, bounds)
        if row.num_tokens == 1:
            decode.append((len(tokens), 1, row.slot, row.position))
        else:
            prefill.extend(_tiles(row, len(tokens), bounds.tile_tokens))
        tokens.extend((row.slot, position) for position in range(row.position, row.position + row.num_tokens))
    if len(tokens) > padded_tokens:
        raise ValueError(f"rows need at least {len(tokens)} tokens, but the plan is padded to {padded_tokens}")
    filled = StepRows(
        tokens=tuple(tokens),
        decode_tiles=tuple(decode),
        prefill_tiles=tuple(prefill),
        graph_mode=graph_mode,
        written=tuple((row.slot, row.position + row.num_tokens) for row in rows),
    )
    return filled.padded_to(padded_tokens)


def _tiles(row: PlanRow, offset: int, tile_tokens: int) -> list[Tile]:
    return [
        (offset + start, min(tile_tokens, row.num_tokens - start), row.slot, row.position + start)
        for start in range(0, row.num_tokens, tile_tokens)
    ]


def _check_row(row: PlanRow, bounds: CacheBounds) -> None:
    if not 0 <= row.slot < bounds.num_slots:
        raise ValueError(f"slot {row.slot} is outside the cache's {bounds.num_slots} slots")
    if row.num_tokens < 1 or row.position < 0 or row.position + row.num_tokens > bounds.slot_tokens:
        raise ValueError(
            f"slot {row.slot}: {row.num_tokens} tokens at position {row.position} don't fit {bounds.slot_tokens}"
        )
