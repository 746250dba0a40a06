"""Single keys from a terminal, without waiting for Enter; the terminal is as before afterwards, whatever happens."""

import contextlib
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any


class Keys:
    """Reads standard input where that is a terminal; elsewhere no key ever comes."""

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
        """The key pressed within `seconds`; empty when none was."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if readable else ""
