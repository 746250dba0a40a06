"""What the processes of a `stageline up` hold: memory, descriptors, threads; and whether one of them only grows.

A process is judged by itself, from the first rest that it was there for to the last one: whatever a stage that was
killed held is gone with it. At a rest no request runs, so what is held then is kept for nobody.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from processes.serving_command import command_line, descendants, environment_of
from stageline_api import env
from stageline_local.session.instance import process_start_ticks

MEBIBYTE: Final = 1024 * 1024
MOST_BYTES: Final = 32 * MEBIBYTE
MOST_SHARE: Final = 0.10
"""Of the memory at the first rest, on top of `MOST_BYTES`: allocators don't give all of it back."""
MOST_FILES: Final = 12
"""Connections that a client of the process keeps open for the next request."""
MOST_THREADS: Final = 8
"""Pools make their threads when they are first needed."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """One process at one moment. `role` is such as `gateway` or `group 0 stage 1`; `resident` is in bytes."""

    role: str
    pid: int
    start_ticks: int
    resident: int
    files: int
    threads: int


def vitals_of(root: int) -> list[Vitals]:
    """A process and all of its descendants that have a part in serving; those that end meanwhile are left out."""
    found = []
    for pid in (root, *sorted(descendants(root))):
        role = "up" if pid == root else role_of(pid)
        vitals = _read(role, pid) if role else None
        if vitals is not None:
            found.append(vitals)
    return sorted(found, key=lambda one: one.role)


def role_of(pid: int) -> str:
    """`gateway`, `group G engine` or `group G stage S`; empty for any other process."""
    arguments = command_line(pid)
    if "gateway" in arguments[1:4]:
        return "gateway"
    kind = arguments[-1] if arguments else ""
    if kind not in ("stage", "engine"):
        return ""
    variables = environment_of(pid)
    if not {env.GROUP_INDEX, env.STAGE_INDEX} <= variables.keys():
        return ""  # it has ended meanwhile
    group = f"group {variables[env.GROUP_INDEX]} {kind}"
    return f"{group} {variables[env.STAGE_INDEX]}" if kind == "stage" else group


def incarnation_of(pid: int) -> int:
    """Of the group that a process belongs to; 0 for a process of no group."""
    return int(environment_of(pid).get(env.INCARNATION, "0"))


def _read(role: str, pid: int) -> Vitals | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    counts = {name: int(value) for name, value in re.findall(r"(VmRSS|Threads):\s+(\d+)", status)}
    ticks = process_start_ticks(pid)
    if ticks is None or "VmRSS" not in counts:
        return None
    return Vitals(role, pid, ticks, counts["VmRSS"] * 1024, files, counts["Threads"])


def lives(rests: Sequence[Sequence[Vitals]]) -> list[tuple[Vitals, Vitals]]:
    """First and last vitals of each process that was there at two rests or more."""
    seen: dict[tuple[int, int], list[Vitals]] = {}
    for rest in rests:
        for one in rest:
            seen.setdefault((one.pid, one.start_ticks), []).append(one)
    return [(vitals[0], vitals[-1]) for vitals in seen.values() if len(vitals) > 1]


def leak(first: Vitals, last: Vitals) -> str:
    """Empty, or what a process holds more of at its last rest than it may."""
    grown = []
    if last.resident - first.resident > MOST_BYTES + first.resident * MOST_SHARE:
        grown.append(f"memory {first.resident // MEBIBYTE} to {last.resident // MEBIBYTE} MiB")
    if last.files - first.files > MOST_FILES:
        grown.append(f"descriptors {first.files} to {last.files}")
    if last.threads - first.threads > MOST_THREADS:
        grown.append(f"threads {first.threads} to {last.threads}")
    return f"{first.role} (pid {first.pid}): {', '.join(grown)}" if grown else ""
