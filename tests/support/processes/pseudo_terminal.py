"""A process on a terminal of its own: what it shows, keys for it, and the terminal's modes."""

import os
import pty
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SECONDS = 90.0
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Makes it the terminal of the process's session, so that Ctrl-C arrives as a signal; then becomes the command."""


class TerminalProcess:
    """Reads all the time, so that the process never waits for a full terminal."""

    def __init__(self, command: Sequence[str], columns: int, rows: int) -> None:
        self._ours, self._theirs = pty.openpty()
        termios.tcsetwinsize(self._theirs, (rows, columns))
        self.modes_before = self.modes
        self._written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        theirs = self._theirs
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        self._reader.start()

    @property
    def shown(self) -> str:
        """All it has written."""
        return self._written.decode(errors="replace")

    @property
    def modes(self) -> list[Any]:
        """Of the terminal: echo, line by line, and so on."""
        return termios.tcgetattr(self._theirs)[:4]

    def read_until(self, text: str, times: int = 1) -> None:
        """Until it has shown `text` so often."""
        deadline = time.monotonic() + SECONDS
        while self.shown.count(text) < times:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.shown}"
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.shown}"
            time.sleep(0.02)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(timeout=SECONDS)

    def close(self) -> None:
        """End it, hard if need be, and give the terminal back."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=SECONDS)
        os.close(self._theirs)
        self._reader.join(10)
        os.close(self._ours)

    def _read(self) -> None:
        try:
            while piece := os.read(self._ours, 65536):
                self._written += piece
        except OSError:
            pass  # the other end is closed


@contextmanager
def on_terminal(command: Sequence[str], columns: int = 100, rows: int = 30) -> Iterator[TerminalProcess]:
    """Run a command on a terminal of that size."""
    terminal = TerminalProcess(command, columns, rows)
    try:
        yield terminal
    finally:
        terminal.close()
