"""Everything that a board asks, with its variables filled in as Grafana fills them in."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from boards.backfilled_prometheus import BackfilledPrometheus
from stageline_dashboards.shipped import board_paths

BOARDS: Final = {path.stem: path for path in board_paths()}
_LABEL_VALUES: Final = re.compile(r"label_values\((.*), (\w+)\)")
_VARIABLE: Final = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")


@dataclass(frozen=True, slots=True)
class BoardQuery:
    """One query of a panel or an annotation, before its variables are filled in."""

    board: str
    title: str
    ref: str
    expr: str
    instant: bool = False
    legend: str = ""


def board_named(name: str) -> dict[str, Any]:
    """A shipped board's JSON."""
    return dict(json.loads(BOARDS[name].read_text(encoding="utf-8")))


def panels_of(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels in order, those of collapsed rows and the rows themselves too."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def queries_of(name: str) -> Iterator[BoardQuery]:
    """What panels and annotations ask."""
    board = board_named(name)
    for panel in panels_of(board):
        for target in panel.get("targets", ()):
            instant = bool(target.get("instant"))
            legend = target.get("legendFormat", "")
            yield BoardQuery(name, panel["title"], target["refId"], target["expr"], instant, legend)
    for annotation in board["annotations"]["list"]:
        yield BoardQuery(name, f"annotation {annotation['name']}", "A", annotation["expr"])


def filled_in(text: str, values: Mapping[str, str]) -> str:
    """With variables replaced. Raises KeyError for one that the board doesn't have."""
    return _VARIABLE.sub(lambda found: values[found[1]], text)


def choices(
    name: str, prometheus: BackfilledPrometheus, start: float, end: float, chosen: Mapping[str, str]
) -> dict[str, str]:
    """Every variable's value: as chosen, else all where that is possible, else the first that there is.

    Asks for the values of each in turn, and fails where there is none. Of a hidden one nothing can be chosen.
    """
    values = {"datasource": "prometheus", "__rate_interval": "2m", "__interval": "30s"}
    for variable in board_named(name)["templating"]["list"]:
        if variable["type"] != "query":
            continue
        found = _LABEL_VALUES.fullmatch(variable["query"]["query"])
        assert found, variable
        offered = prometheus.label_values(filled_in(found[1], values), found[2], start, end)
        # A label that few give its series, such as `cluster`, has no values where nobody does; all of them is any then.
        assert offered or variable.get("allValue"), f"{name}: nothing to choose from for {variable['name']}"
        everything = variable.get("allValue") or f"({'|'.join(offered)})"
        wanted = None if variable.get("hide") else chosen.get(variable["name"])
        assert wanted is None or wanted in offered, f"{wanted} is not among {offered}"
        values[variable["name"]] = wanted or (everything if variable["includeAll"] else sorted(offered)[0])
    return values


def panel_titled(name: str, title: str) -> dict[str, Any]:
    """The one panel with that title."""
    (panel,) = [each for each in panels_of(board_named(name)) if each["title"] == title]
    return panel


def every_expression(path: Path) -> Sequence[str]:
    """All PromQL of a board's file, variables' selectors too."""
    board = json.loads(path.read_text(encoding="utf-8"))
    variables = [each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    matches = [_LABEL_VALUES.fullmatch(text) for text in variables]
    assert all(matches), variables
    return [*(match[1] for match in matches if match), *(each.expr for each in queries_of(path.stem))]
