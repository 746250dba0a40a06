"""Panels of *Fleet* about what users were promised: how long they wait, and how fast the budgets of it are spent."""

from board_builder.latencies import heat, quantile_lines
from board_builder.layout import Section, line, section
from board_builder.objectives import BURN, FIRST_TOKEN_SECONDS, OBJECTIVES, OUTPUT_TOKEN_SECONDS, Objective
from board_builder.panels import AnyPanel, Limits, Series, Text, lines
from board_builder.queries import selected
from board_builder.tables import Column, Key, rows
from stageline_gateway.telemetry import metric_names as names

Matchers = tuple[str, ...]


def latency(matchers: Matchers) -> Section:
    """What users wait for, as quantiles and as where the samples lie."""
    first = Text("First token", "From a request's arrival to its first token.", "s")
    output = Text("Per token", "Per finished request: time from its first to its last token, by token.", "s")
    whole = Text("Whole answers", "From arrival to the end of the answer, for requests that finished.", "s")
    histograms = {
        "time to first token": (first, names.TIME_TO_FIRST_TOKEN.name),
        "time per token": (output, names.TIME_PER_OUTPUT_TOKEN.name),
        "whole time": (whole, names.E2E_REQUEST_LATENCY.name),
    }
    spread = "Requests by {}", "Each column of cells is a moment. Darker: more requests took so long."
    return section(
        "How long do users wait?",
        line(8, *(quantile_lines(text, name, *matchers) for text, name in histograms.values())),
        line(
            8,
            *(
                heat(Text(spread[0].format(what), spread[1], "s"), name, *matchers)
                for what, (_, name) in histograms.items()
            ),
        ),
    )


def promises(matchers: Matchers) -> Section:
    """How fast each budget of what users were promised is spent."""
    table = Text(
        "Budgets by model",
        "Each promise's budget as a multiple of how fast it may be spent: over the last hour, and over three days. "
        "Then how soon tokens of this model are promised.",
        "none",
    )
    columns = [
        Column(f"{name} {window}", each.burn(window, *matchers), "none", BURN if window == "1h" else Limits(1, 2))
        for name, each in OBJECTIVES.items()
        for window in ("1h", "3d")
    ]
    columns += [
        Column(f"{name} promised", selected(seconds, *matchers), "s")
        for name, seconds in (("First token", FIRST_TOKEN_SECONDS), ("Per token", OUTPUT_TOKEN_SECONDS))
    ]
    keys = (Key("namespace", "Namespace"), Key("model_name", "Model"))
    return section(
        "Is what was promised kept?",
        line(8, *(_burn(name, each, matchers) for name, each in OBJECTIVES.items())),
        line(5, rows(table, keys, columns, sort="First token 1h")),
    )


def _burn(name: str, objective: Objective, matchers: Matchers) -> AnyPanel:
    text = Text(
        f"{name}: budget burn",
        "Over one and six hours, by model. 1 lasts as long as meant. Alerts look at the same numbers.",
        "none",
    )
    windows = (Series(objective.burn(window, *matchers), f"{{{{model_name}}}} {window}") for window in ("1h", "6h"))
    return lines(text, *windows, limits=BURN)
