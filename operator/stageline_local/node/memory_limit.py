"""Enforces a container's memory limit by polling: a plain process has no cgroup, so the kernel can't.

It counts memory that a cgroup can't reclaim: anonymous and shared memory. Pages of mapped files don't count, so mapped
weights cost nothing here either. A container that exceeds its limit only between two polls is not noticed. One that
stays over it is killed within `LOOK_SECONDS`.
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
"""Index in `/proc/PID/stat`, counted after the command's name: state, parent, process group, session."""


def memory_limit_bytes(container: Mapping[str, Any]) -> int | None:
    """`resources.limits.memory` of a container; None if it is unset or 0, which means the same."""
    given = container.get("resources", {}).get("limits", {}).get("memory", 0)
    return int(parse_quantity(given)) or None


async def keep_to_limit(container: Mapping[str, Any], process: ContainerProcess) -> None:
    """Kill a container that exceeds its limit; without a limit return at once. Cancelled when it has ended."""
    limit_bytes = memory_limit_bytes(container)
    if limit_bytes is None:
        return
    while not process.has_ended:
        if held_bytes(process.pid, limit_bytes) > limit_bytes:
            process.kill_over_memory()
        await asyncio.sleep(LOOK_SECONDS)


def held_bytes(session: int, enough_bytes: int = 0) -> int:
    """Memory of the processes of a session, in bytes.

    First, shared pages are counted once for each process, which is fast and never too low. Only if that exceeds
    `enough_bytes` are they divided among the processes, for which the kernel walks all pages.
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
        # The command's name is in parentheses and may itself contain some.
        fields = _read(process / "stat").rpartition(")")[2].split()
        if len(fields) > _SESSION_FIELD and int(fields[_SESSION_FIELD]) == session:
            yield process


def _sum_of(file: Path, *names: str) -> int:
    """Sum of lines such as `RssAnon: 12 kB`, in bytes; 0 for a process that has ended."""
    amounts = dict(line.split(":", 1) for line in _read(file).splitlines() if ":" in line)
    return sum(int(amounts[name].split()[0]) * 1024 for name in names if name in amounts)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
