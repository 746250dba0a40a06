"""`python -m board_builder` writes the boards; `--check` only compares them."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

import stageline_dashboards
from board_builder.board import as_json
from board_builder.fleet_board import fleet_board
from board_builder.gateway_board import gateway_board
from board_builder.operator_board import operator_board
from board_builder.pipeline_board import pipeline_board

BOARDS: Final[Mapping[str, Callable[[], Dashboard]]] = {
    "fleet.json": fleet_board,
    "gateway.json": gateway_board,
    "operator.json": operator_board,
    "pipeline.json": pipeline_board,
}
FOLDER: Final = Path(stageline_dashboards.__path__[0]) / "boards"


def made_boards() -> dict[str, str]:
    """JSON by file name."""
    return {name: as_json(make()) for name, make in BOARDS.items()}


def stale_files(folder: Path = FOLDER) -> list[str]:
    """Boards that differ from the sources, and files without a source."""
    made = made_boards()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in made | there if made.get(name) != there.get(name))


def main(arguments: list[str]) -> int:
    """Exit status: 1 if `--check` finds an outdated board."""
    if arguments == ["--check"]:
        stale = stale_files()
        if stale:
            sys.stderr.write(f"Out of date, run make generate: {', '.join(stale)}\n")
        return 1 if stale else 0
    if arguments:
        sys.stderr.write("usage: python -m board_builder [--check]\n")
        return 2
    for name, text in made_boards().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
