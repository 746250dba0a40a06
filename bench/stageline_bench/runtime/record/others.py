"""CPU time of other processes than a benchmark and its children (Linux).

It explains a round that was slow because another process used the CPU.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_IDLE_FIELDS: Final = (3, 4)
"""Of the first line of `/proc/stat`: idle, and waiting for a disk (proc(5))."""
_COUNTED_FIELDS: Final = 8
"""Up to stolen time; guest time is already in user time."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class OthersClock:
    """CPU seconds of other processes since this was created; with two CPUs, up to two per second."""

    def __init__(self, proc: Path = PROC, own: int | None = None) -> None:
        """`own`: the process that, with all its descendants, is the benchmark; None: this one."""
        self._proc = proc
        self._own = os.getpid() if own is None else own
        self._before = self._others()

    def seconds(self) -> float:
        """Ended descendants of `own` count as other processes."""
        return max(0.0, self._others() - self._before)

    def _others(self) -> float:
        own = sum(self._ticks_of(process) for process in self._family(self._own))
        return (self._machine_ticks() - own) / _TICKS

    def _machine_ticks(self) -> int:
        first = (self._proc / "stat").read_text(encoding="ascii").splitlines()[0]
        fields = [int(field) for field in first.split()[1:]]
        return sum(ticks for index, ticks in enumerate(fields[:_COUNTED_FIELDS]) if index not in _IDLE_FIELDS)

    def _ticks_of(self, process: int) -> int:
        """User and system time of all its threads; its name may contain spaces and brackets."""
        try:
            after_name = (self._proc / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return 0
        return int(after_name[11]) + int(after_name[12])

    def _family(self, process: int) -> Iterator[int]:
        yield process
        for children in (self._proc / str(process) / "task").glob("*/children"):
            try:
                below = [int(child) for child in children.read_text(encoding="ascii").split()]
            except OSError:
                continue
            for child in below:
                yield from self._family(child)
