"""How long things took on the real nodes, for a table at the end of the run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Durations:
    """Seconds by what was timed, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Time a block; one that fails is not recorded."""
        started = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - started

    def table(self) -> str:
        """Markdown."""
        rows = [f"| {what} | {seconds:.1f} |" for what, seconds in self.seconds.items()]
        return "\n".join(["| what | seconds |", "| --- | --- |", *rows])
