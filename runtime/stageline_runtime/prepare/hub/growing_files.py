"""Reports how much a library has downloaded by looking at the files that it fills."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stageline_runtime.prepare.progress import AdvanceTo

LOOK_SECONDS = 0.5


@contextmanager
def report_growth(directory: Path, advance_to: AdvanceTo) -> Iterator[None]:
    """While the body runs, report the bytes below `directory` twice a second, and once more at the end."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            advance_to(bytes_below(directory))

    watcher = threading.Thread(target=look, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    advance_to(bytes_below(directory))


def bytes_below(directory: Path) -> int:
    """Sum of the sizes of all files below `directory`. A file may go away while we look."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
