"""Run pip and say how far it is: `python pip_progress.py install …`; the exit code is pip's.

On a terminal one line is redrawn: the file that is downloaded, its size, how much there is in all, then how many packages
are installed. Elsewhere large files and, every ten seconds, the same line are printed. It runs before anything is
installed, so it uses the standard library alone.
"""

import queue
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import IO

LINE_SECONDS = 10.0
REDRAW_SECONDS = 0.2
LARGE_BYTES = 50_000_000
MEGABYTE = 1_000_000
INTERRUPTED = 130
_DOWNLOADING = re.compile(r"\s*Downloading (?P<name>\S+)(?: \((?P<size>[^)]*)\))?")
_PROGRESS = re.compile(r"Progress (?P<done>\d+) of (?P<total>\d+)")


class Progress:
    """What pip has said so far."""

    def __init__(self) -> None:
        self.num_packages = 0
        self.num_files = 0
        self.name = ""
        self.done_bytes = self.total_bytes = self.earlier_bytes = 0
        self.num_to_install = 0

    def feed(self, line: str) -> str | None:
        """Take one line of pip's; returns what is worth a line of its own."""
        if match := _PROGRESS.match(line):
            is_new = not self.total_bytes
            self.done_bytes, self.total_bytes = int(match["done"]), int(match["total"])
            if is_new and self.total_bytes >= LARGE_BYTES:
                return f"downloading {self.name} ({_megabytes(self.total_bytes)})"
        elif match := _DOWNLOADING.match(line):
            if not match["name"].endswith(".metadata"):
                self.earlier_bytes += self.done_bytes
                self.num_files += 1
                self.name, self.done_bytes, self.total_bytes = match["name"].rsplit("/", 1)[-1], 0, 0
        elif line.startswith("Collecting "):
            self.num_packages += 1
        elif line.startswith("Installing collected packages: "):
            self.earlier_bytes, self.done_bytes = self.earlier_bytes + self.done_bytes, 0
            self.num_to_install = line.count(",") + 1
            return f"downloaded {_megabytes(self.earlier_bytes)}; installing {self.num_to_install} packages"
        return None

    def line(self, num_installed: int) -> str:
        if self.num_to_install:
            return f"installed {min(num_installed, self.num_to_install)} of {self.num_to_install} packages"
        if not self.num_files:
            return f"looking up packages: {self.num_packages}"
        file = f" ({_megabytes(self.done_bytes)} of {_megabytes(self.total_bytes)})" if self.total_bytes else ""
        in_all = _megabytes(self.earlier_bytes + self.done_bytes)
        return f"downloading file {self.num_files}, {self.name}{file}; {in_all} in all"


class Screen:
    """A line that is redrawn on a terminal; elsewhere lines, few enough for a log."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._shown_at = time.monotonic()

    def say(self, line: str) -> None:
        if not self._is_terminal:
            print(f"  {line}", flush=True)
            self._shown_at = time.monotonic()

    def show(self, line: str) -> None:
        seconds = time.monotonic() - self._shown_at
        if self._is_terminal and seconds >= REDRAW_SECONDS:
            width = shutil.get_terminal_size().columns - 3
            print(f"\r\033[K  {line[:width]}", end="", flush=True)
            self._shown_at = time.monotonic()
        elif not self._is_terminal and seconds >= LINE_SECONDS:
            self.say(line)

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", flush=True)


def _megabytes(count: int) -> str:
    return f"{count / MEGABYTE:.0f} MB" if count >= MEGABYTE else f"{count / MEGABYTE:.1f} MB"


def _num_installed(packages: Path) -> int:
    return sum(1 for _ in packages.glob("*.dist-info"))


def _tells_progress() -> bool:
    """Whether this pip writes its progress as lines: since 24.1."""
    major, minor = version("pip").split(".")[:2]
    return (int(major), int(minor)) >= (24, 1)


def run(arguments: list[str]) -> int:
    command = [sys.executable, "-u", "-m", "pip", "--no-color", "--disable-pip-version-check", *arguments]
    if not _tells_progress():
        return subprocess.call(command)
    pip = subprocess.Popen([*command, "--progress-bar", "raw"], stdout=subprocess.PIPE, text=True, errors="replace")
    assert pip.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pip.stdout, lines), daemon=True).start()
    progress, screen = Progress(), Screen()
    packages = Path(sysconfig.get_path("purelib"))
    before = _num_installed(packages)
    try:
        while (line := _next(lines)) is not None:
            if said := progress.feed(line):
                screen.say(said)
            screen.show(progress.line(_num_installed(packages) - before if progress.num_to_install else 0))
        return pip.wait()
    except KeyboardInterrupt:
        pip.wait()  # the terminal has interrupted it too
        return INTERRUPTED
    finally:
        screen.clear()


def _read(output: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


def _next(lines: "queue.SimpleQueue[str | None]") -> str | None:
    """The next line; an empty one where none comes for a while, None at the end."""
    try:
        return lines.get(timeout=1.0)
    except queue.Empty:
        return ""


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
