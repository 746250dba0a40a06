"""Panels of *Pipeline* about stages with several ranks: which rank do the others wait for?

All other panels are about stages: their series exist once per stage, so nothing is summed over ranks.
"""

from typing import Final

from board_builder.layout import Section, line, section
from board_builder.panels import Series, Text, lines
from board_builder.queries import in_order, rate_by, selected, share, sum_by
from board_builder.stages import STAGE
from stageline_runtime import metric_names as names

RANK: Final = (*STAGE, "rank")
OF_RANK: Final = "group {{group}} stage {{stage}} rank {{rank}}"


def ranks(matchers: tuple[str, ...]) -> Section:
    """Empty for a model with `spec.parallelism.tensor` of 1."""
    exchanged = Text(
        "Exchange share by rank",
        "Share of each rank's busy time that it spends in exchanges with the other ranks of its stage, most of it "
        "waiting for them. The rank with the smallest share is the slow one. All of them large: the layers are too "
        "small for so many ranks, or ranks share a core.",
        "percentunit",
    )
    computed = Text(
        "Compute by rank",
        "Share of time each rank computes, without exchanges. A rank above the others of its stage shares "
        "its CPU with another process, or runs on a slower one.",
        "percentunit",
    )
    memory = Text("Memory by rank", "Weights and KV cache that each rank holds; a stage holds their sum.", "bytes")
    busy = rate_by(RANK, names.RANK_BUSY.name, *matchers)
    exchange = rate_by(RANK, names.RANK_EXCHANGE.name, *matchers)
    return section(
        "Ranks",
        line(
            8,
            lines(exchanged, Series(in_order(share(exchange, busy)), OF_RANK)),
            lines(computed, Series(in_order(f"{busy} - {exchange}"), OF_RANK)),
            lines(memory, Series(in_order(sum_by(RANK, selected(names.RANK_MEMORY.name, *matchers))), OF_RANK)),
        ),
        collapsed=True,
    )
