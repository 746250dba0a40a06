"""How long this process's threads were runnable without a CPU because others used it; Linux reports this per thread.

A thread that is blocked, as in a deadlock, or that computes isn't waiting for a CPU.
"""

from pathlib import Path

_TASKS = Path("/proc/self/task")


class CpuWaits:
    """Counts from its making on."""

    def __init__(self, tasks: Path = _TASKS) -> None:
        self._tasks = tasks
        self._seen = self._read()

    def look(self) -> float:
        """Seconds since the last look for which the thread that waited longest did; 0 where the kernel doesn't tell."""
        before, self._seen = self._seen, self._read()
        longest = max((waited - before.get(thread, 0) for thread, waited in self._seen.items()), default=0)
        return longest / 1e9

    def _read(self) -> dict[str, int]:
        """Nanoseconds by thread: the second number of `schedstat`."""
        waits: dict[str, int] = {}
        for stat in self._tasks.glob("*/schedstat"):
            try:
                waits[stat.parent.name] = int(stat.read_text(encoding="ascii").split()[1])
            except (OSError, IndexError):  # the thread has ended
                continue
        return waits
