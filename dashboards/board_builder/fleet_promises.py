"""Panels of *Fleet*: latency, and the burn rates of the objectives' error budgets."""

from board_builder.latencies import heat, quantile_lines
from board_builder.layout import Section, line, section
from board_builder.objectives import BURN, FIRST_TOKEN_SECONDS, OBJECTIVES, OUTPUT_TOKEN_SECONDS, Objective
from board_builder.panels import AnyPanel, Limits, Series, Text, lines
from board_builder.queries import selected
from board_builder.tables import Column, Key, rows
from stageline_gateway.telemetry import metric_names as names

Matchers = tuple[str, ...]


def latency(matchers: Matchers) -> Section:
    """TTFT, TPOT and E2E latency, as quantiles and as heatmaps of their distribution."""
    first = Text("TTFT (time to first token)", "From a request's arrival to its first token.", "s")
    output = Text(
        "TPOT (time per output token)",
        "Per finished request: time from its first to its last token, divided by the number of tokens.",
        "s",
    )
    whole = Text("E2E latency", "From arrival to the end of the answer, for requests that finished.", "s")
    histograms = {
        "TTFT": (first, names.TIME_TO_FIRST_TOKEN.name),
        "TPOT": (output, names.TIME_PER_OUTPUT_TOKEN.name),
        "E2E latency": (whole, names.E2E_REQUEST_LATENCY.name),
    }
    spread = "{} distribution", "Each column of cells is a moment. Darker: more requests took so long."
    return section(
        "Latency",
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
    """Burn rates of the error budgets, and the objectives."""
    table = Text(
        "Error budgets by model",
        "Burn rate of each objective's error budget over the last hour and over three days; 1 is as fast as allowed. "
        "Then the latency objectives of the model.",
        "none",
    )
    columns = [
        Column(f"{name} {window}", each.burn(window, *matchers), "none", BURN if window == "1h" else Limits(1, 2))
        for name, each in OBJECTIVES.items()
        for window in ("1h", "3d")
    ]
    columns += [
        Column(f"{name} objective", selected(seconds, *matchers), "s")
        for name, seconds in (("TTFT", FIRST_TOKEN_SECONDS), ("TPOT", OUTPUT_TOKEN_SECONDS))
    ]
    keys = (Key("namespace", "Namespace"), Key("model_name", "Model"))
    return section(
        "SLOs and error budgets",
        line(8, *(_burn(name, each, matchers) for name, each in OBJECTIVES.items())),
        line(5, rows(table, keys, columns, sort="TTFT 1h")),
    )


def _burn(name: str, objective: Objective, matchers: Matchers) -> AnyPanel:
    text = Text(
        f"{name}: burn rate",
        "How fast the error budget is spent, over one and six hours, by model. At 1 it lasts exactly as long as "
        "planned. Alerts use the same series.",
        "none",
    )
    windows = (Series(objective.burn(window, *matchers), f"{{{{model_name}}}} {window}") for window in ("1h", "6h"))
    return lines(text, *windows, limits=BURN)
