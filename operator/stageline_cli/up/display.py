"""Shows the stages of `stageline up`: a live table on a terminal, else a line per change. Always on stderr."""

import time
from collections.abc import Sequence
from typing import Final, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stageline_cli.up.stage_view import StageRow
from stageline_local.session.stage_polling import Rates

_SECONDS_BETWEEN_RATES: Final = 5.0


class Display(Protocol):
    """The output of `up`."""

    def show(self, rows: Sequence[StageRow], rates: Rates | None) -> None:
        """Show the current state."""

    def say(self, line: str) -> None:
        """Print a permanent line."""

    def close(self) -> None:
        """Restore the terminal."""


def rates_text(rates: Rates) -> str:
    bubble = "idle" if rates.bubble is None else f"bubble {rates.bubble:.2f}"
    return f"{rates.tokens_per_second:.1f} tok/s, {bubble}"


class PlainDisplay:
    """One line for each change; rates now and then, and only while tokens are generated."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[tuple[int, int], tuple[object, ...]] = {}
        self._rates_at = 0.0

    def show(self, rows: Sequence[StageRow], rates: Rates | None) -> None:
        for row in rows:
            key = (row.group, row.stage)
            if self._shown.get(key) != row.milestone:
                self._shown[key] = row.milestone
                self.say(plain_line(row))
        now = time.monotonic()
        if rates is not None and rates.tokens_per_second > 0 and now - self._rates_at >= _SECONDS_BETWEEN_RATES:
            self._rates_at = now
            self.say(rates_text(rates))

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to restore."""


class LiveDisplay:
    """A table that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._live.start()

    def show(self, rows: Sequence[StageRow], rates: Rates | None) -> None:
        footer = Text(rates_text(rates) if rates is not None else "", style="bold")
        self._live.update(Group(stage_table(rows), footer))

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def plain_line(row: StageRow) -> str:
    parts = [f"group {row.group} stage {row.stage}: {row.phase}"]
    if row.progress is not None:
        parts.append(f"{row.progress:.0%}")
    if row.layers:
        parts.append(f"layers {row.layers}")
    if row.memory:
        parts.append(row.memory)
    if row.message:
        parts.append(row.message)
    return ", ".join(parts)


def stage_table(rows: Sequence[StageRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("group", "stage", "layers", "memory", "phase", "", ""):
        table.add_column(heading, no_wrap=heading != "")
    for row in rows:
        bar = "" if row.progress is None else ProgressBar(total=1.0, completed=row.progress, width=20)
        style = "green" if row.phase == "Ready" else "yellow"
        phase = Text(row.phase, style=style)
        table.add_row(str(row.group), str(row.stage), row.layers, row.memory, phase, bar, escape(row.message))
    return table
