"""A board's grid, 24 columns wide: sections of lines of panels, one below the other, without gaps or overlap."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.models.dashboard import GridPos

from board_builder.panels import AnyPanel

COLUMNS: Final = 24


@dataclass(frozen=True, slots=True)
class Line:
    """Panels beside each other. `widths` are in columns; by default all are equal."""

    height: int
    panels: tuple[AnyPanel, ...]
    widths: tuple[int, ...] = ()

    def columns(self) -> tuple[int, ...]:
        """Each panel's width. Raises ValueError for widths that don't fill the line."""
        widths = self.widths or (COLUMNS // len(self.panels),) * len(self.panels)
        if len(widths) != len(self.panels) or sum(widths) != COLUMNS:
            raise ValueError(f"{len(self.panels)} panels of widths {widths} don't fill {COLUMNS} columns")
        return widths


@dataclass(frozen=True, slots=True)
class Section:
    """A row of the board with its heading; a collapsed one opens on a click and queries nothing before."""

    title: str
    lines: tuple[Line, ...]
    collapsed: bool = False


def line(height: int, *panels: AnyPanel, widths: tuple[int, ...] = ()) -> Line:
    """Panels beside each other."""
    return Line(height, panels, widths)


def section(title: str, *lines: Line, collapsed: bool = False) -> Section:
    """A heading and the lines below it."""
    return Section(title, lines, collapsed)


def lay_out(board: Dashboard, sections: Sequence[Section]) -> None:
    """Add all panels, placed and numbered from the top."""
    y, number = 0, 0
    for each in sections:
        number += 1
        row = Row(each.title).id(number).collapsed(each.collapsed).grid_pos(GridPos(h=1, w=COLUMNS, x=0, y=y))
        y += 1
        placed: list[AnyPanel] = []
        for one in each.lines:
            x = 0
            for panel, width in zip(one.panels, one.columns(), strict=True):
                number += 1
                placed.append(panel.id(number).grid_pos(GridPos(h=one.height, w=width, x=x, y=y)))
                x += width
            y += one.height
        _add(board, row, placed, each.collapsed)


def _add(board: Dashboard, row: Row, panels: Sequence[AnyPanel], collapsed: bool) -> None:
    """Grafana keeps the panels of a collapsed row inside it, those of an open one after it."""
    if collapsed:
        for panel in panels:
            row.with_panel(panel)
    board.with_row(row)
    if not collapsed:
        for panel in panels:
            board.with_panel(panel)
