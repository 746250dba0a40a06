"""Enforces a container's memory limit by polling: a plain process has no cgroup in which the kernel would do it.

What counts is what a cgroup can't take back when it is full: anonymous and shared memory. Pages of mapped files don't
count, so weights that are mapped cost nothing here either. A container that is over its limit between two looks and
under it at the second is not noticed; one that stays over it is ended within `LOOK_SECONDS`.
"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from stageline_api.resource.quantities import parse_quantity
from stageline_local.node.container import ContainerProcess

LOOK_SECONDS: Final = 0.5
_PROC: Final = Path("/proc")
_SESSION_FIELD: Final = 3
"""Of `/proc/PID/stat`, counted after the command's name: state, parent, process group, session."""


def memory_limit_bytes(container: Mapping[str, Any]) -> int | None:
    """`resources.limits.memory` of a container; None where there is none, and for 0, which means the same."""
    given = container.get("resources", {}).get("limits", {}).get("memory", 0)
    return int(parse_quantity(given)) or None


async def keep_to_limit(container: Mapping[str, Any], process: ContainerProcess) -> None:
    """End a container that holds more than it may; without a limit return at once. Cancelled when it has ended."""
    limit_bytes = memory_limit_bytes(container)
    if limit_bytes is None:
        return
    while not process.has_ended:
        if held_bytes(process.pid, limit_bytes) > limit_bytes:
            process.kill_over_memory()
        await asyncio.sleep(LOOK_SECONDS)


def held_bytes(session: int, enough_bytes: int = 0) -> int:
    """Memory that the processes of a session hold, in bytes.

    Pages that processes share are counted once for each of them, which is quick and never too little. Only when that
    is more than `enough_bytes` are they shared out, which takes the kernel a walk through all pages.
    """
    members = list(_members(session))
    quick = sum(_sum_of(member / "status", "RssAnon", "RssShmem") for member in members)
    if quick <= enough_bytes:
        return quick
    return sum(_sum_of(member / "smaps_rollup", "Pss_Anon", "Pss_Shmem") for member in members)


def _members(session: int) -> Iterator[Path]:
    for process in _PROC.iterdir():
        if not process.name.isdecimal():
            continue
        # The command's name stands in parentheses and may itself hold some.
        fields = _read(process / "stat").rpartition(")")[2].split()
        if len(fields) > _SESSION_FIELD and int(fields[_SESSION_FIELD]) == session:
            yield process


def _sum_of(file: Path, *names: str) -> int:
    """Sum of lines such as `RssAnon:   12 kB`, in bytes; 0 for a process that has ended meanwhile."""
    amounts = dict(line.split(":", 1) for line in _read(file).splitlines() if ":" in line)
    return sum(int(amounts[name].split()[0]) * 1024 for name in names if name in amounts)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
