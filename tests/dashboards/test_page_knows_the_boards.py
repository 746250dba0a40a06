"""The page of `up --monitor` knows what the shipped boards use and nothing else: the rest would be code to keep."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import stageline_local.monitoring
from boards.board_queries import BOARDS, board_named, panels_of

PAGE: Final = Path(stageline_local.monitoring.__path__[0]) / "page_files"
DEFAULTS: Final = {"none"}
"""The unit of axes and readouts that say nothing."""


def known(file: str, *tables: str) -> set[str]:
    """Keys of the objects that a module calls by these names."""
    text = (PAGE / file).read_text(encoding="utf-8")
    found: set[str] = set()
    for table in tables:
        inside = re.search(rf"^const {table} = \{{(.*?)\n?\}};$", text, re.MULTILINE | re.DOTALL)
        assert inside, f"{file} has no {table}"
        one_line = "\n" not in inside[1]
        keys = r"([\w-]+): " if one_line else r'^  "?([\w-]+)"?(?::|,$)'
        found |= set(re.findall(keys, inside[1], re.MULTILINE))
    return found


def drawn() -> Iterator[dict[str, Any]]:
    for name in BOARDS:
        yield from (panel for panel in panels_of(board_named(name)) if panel["type"] != "row")


def values_at(document: Any, *path: str) -> Iterator[Any]:
    """All values under these keys, through lists on the way; none where a key is missing."""
    if isinstance(document, list):
        for each in document:
            yield from values_at(each, *path)
    elif not path:
        yield document
    elif isinstance(document, dict) and path[0] in document:
        yield from values_at(document[path[0]], *path[1:])


def used(*path: str) -> set[str]:
    return {value for panel in drawn() for value in values_at(panel, *path)}


def units() -> set[str]:
    overridden = {
        prop["value"]
        for panel in drawn()
        for prop in values_at(panel, "fieldConfig", "overrides", "properties")
        if prop["id"] == "unit"
    }
    options = used("options", "yAxis", "unit") | used("options", "cellValues", "unit")
    return overridden | options | used("fieldConfig", "defaults", "unit")


@pytest.mark.parametrize(
    ("what", "page", "boards"),
    [
        ("panels", known("panels.js", "DRAWINGS", "TABLES"), used("type")),
        ("units", known("units.js", "FORMATS"), {unit for unit in units() if not unit.startswith("suffix:")}),
        ("transformations", known("tables.js", "CHANGES"), used("transformations", "id")),
        (
            "calculations",
            known("reducers.js", "REDUCERS"),
            used("options", "reduceOptions", "calcs") | used("options", "legend", "calcs"),
        ),
        ("colour scales", known("colours.js", "SCALES"), used("options", "color", "scheme")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_boards_use_all_that_the_page_knows_and_no_more(what: str, page: set[str], boards: set[str]) -> None:
    assert page
    assert page - DEFAULTS == boards - DEFAULTS, what
