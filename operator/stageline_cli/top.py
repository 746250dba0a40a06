"""`stageline top`: the activity of every stage, redrawn until q or Ctrl-C; plain text without a terminal."""

import contextlib
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live

from stageline_cli.on_call.sources.choose_source import open_source, source_options
from stageline_cli.on_call.views.top_view import top_view
from stageline_cli.on_call.views.watch import Watch
from stageline_cli.status import plain_or_terminal


@click.command()
@click.argument("model", required=False)
@source_options
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=60),
    default=2.0,
    show_default=True,
    help="Seconds between two readings.",
)
@click.option("--once", is_flag=True, help="Read twice, print one frame and exit.")
def top(model: str | None, interval: float, once: bool, **where: Any) -> None:
    """Watch all models, or MODEL: each stage's busy, waiting and idle time, bubble, bottleneck, rates and latencies.

    q or Ctrl-C ends it.
    """
    with open_source(**where) as source:
        watch = Watch(source, model)
        watch.look()
        console = plain_or_terminal()
        try:
            if once or not console.is_terminal:
                _print_frames(watch, console, interval, once)
            else:
                _draw_frames(watch, console, interval)
        except KeyboardInterrupt:
            pass


def _print_frames(watch: Watch, console: Console, interval: float, once: bool) -> None:
    while True:
        time.sleep(interval)
        console.print(Group(*top_view(watch.look(), console.width)))
        sys.stdout.flush()
        if once:
            return
        console.print()


def _draw_frames(watch: Watch, console: Console, interval: float) -> None:
    first = Group(*top_view(watch.latest(), console.width))
    with (
        Keys() as keys,
        Live(first, console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live,
    ):
        while keys.wait(interval) not in ("q", "Q"):
            live.update(Group(*top_view(watch.look(), console.width)), refresh=True)


class Keys:
    """Reads keys from standard input if that is a terminal."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> "Keys":
        if sys.stdin is not None and sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """The key pressed within `seconds`; empty if there was none."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if readable else ""
