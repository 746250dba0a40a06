"""How preparation tells a person that it moves: a bar on a terminal, a line every two seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

MIN_SECONDS_BETWEEN_LINES = 2.0
MIB = 1 << 20


class AdvanceTo(Protocol):
    def __call__(self, done_bytes: int, total_bytes: int | None = None, /) -> None:
        """`done_bytes` so far; `total_bytes` when it became known only now."""


class Reporter(Protocol):
    def note(self, line: str) -> None:
        """Say one line."""

    def task(self, title: str, total_bytes: int | None) -> AbstractContextManager[AdvanceTo]:
        """Report one piece of work; `total_bytes` is None when the size isn't known."""


class PlainReporter:
    """Plain lines for logs, at most one every two seconds of a task. `clock` is monotonic, in seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock

    def note(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    @contextmanager
    def task(self, title: str, total_bytes: int | None) -> Iterator[AdvanceTo]:
        self.note(f"{title} ({total_bytes / MIB:.1f} MiB)" if total_bytes else title)
        last_line_at = self._clock()
        done, total = 0, total_bytes

        def advance_to(done_bytes: int, new_total_bytes: int | None = None, /) -> None:
            nonlocal last_line_at, done, total
            done, total = done_bytes, new_total_bytes or total
            if self._clock() - last_line_at >= MIN_SECONDS_BETWEEN_LINES:
                last_line_at = self._clock()
                self.note(f"{title}: {_amount(done, total)}")

        yield advance_to
        self.note(f"{title}: done, {done / MIB:.1f} MiB")


class BarReporter:
    """A progress bar for a person at a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    @contextmanager
    def task(self, title: str, total_bytes: int | None) -> Iterator[AdvanceTo]:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task(title, total=total_bytes)

            def advance_to(done_bytes: int, new_total_bytes: int | None = None, /) -> None:
                progress.update(bar, completed=done_bytes, total=new_total_bytes or total_bytes)

            yield advance_to


def reporter_for(stream: TextIO = sys.stderr) -> Reporter:
    """A bar when `stream` is a terminal, else plain lines."""
    return BarReporter(Console(file=stream)) if stream.isatty() else PlainReporter(stream)


def _amount(done_bytes: int, total_bytes: int | None) -> str:
    if not total_bytes:
        return f"{done_bytes / MIB:.1f} MiB"
    return f"{100 * done_bytes / total_bytes:.0f}% ({done_bytes / MIB:.1f} of {total_bytes / MIB:.1f} MiB)"
