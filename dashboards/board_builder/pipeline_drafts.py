"""Panels of *Pipeline*: acceptance of drafts, and tokens per row."""

from typing import Final

from board_builder.layout import Section, line, section
from board_builder.panels import Series, Text, lines
from board_builder.queries import rate_by, share
from board_builder.stages import GROUP
from stageline_runtime import metric_names as names

OF_GROUP: Final = "group {{group}}"


def drafts(matchers: tuple[str, ...]) -> Section:
    """Empty for a model without `spec.engine.speculative`."""
    acceptance = Text(
        "Draft acceptance ratio",
        "Share of drafted tokens that were accepted. Low: answers repeat little of the earlier text, and the engine "
        "drafts fewer tokens.",
        "percentunit",
    )
    tokens = Text(
        "Draft tokens",
        "Drafted tokens that stages verified, and accepted ones, per second.",
        "suffix: tokens/s",
    )
    length = Text(
        "Accepted length",
        "Accepted drafts per row with drafts. The row generates one token more than that.",
        "none",
    )
    drafted = rate_by(GROUP, names.DRAFT_TOKENS.name, *matchers)
    held = rate_by(GROUP, names.ACCEPTED_TOKENS.name, *matchers)
    rows = rate_by(GROUP, names.DRAFTED_ROWS.name, *matchers)
    return section(
        "Drafts",
        line(
            8,
            lines(acceptance, Series(share(held, drafted), OF_GROUP)),
            lines(tokens, Series(f"{drafted} > 0", f"{OF_GROUP} drafted"), Series(held, f"{OF_GROUP} accepted")),
            lines(length, Series(share(held, rows), OF_GROUP)),
        ),
        collapsed=True,
    )
