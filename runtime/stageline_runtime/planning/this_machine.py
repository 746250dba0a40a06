"""This machine (Linux): the memory and the cores that a process may still take, and the machine as hardware of a plan.

Memory and cores are read from the operating system, limits of the control group included. Bandwidth and compute are the
`cpu-core` preset times the cores that each stage gets: a rough estimate, not a measurement.
"""

import os
import socket
from pathlib import Path
from typing import Final

from stageline_api import env
from stageline_runtime.planning.devices import CPU_CORE, ComputeRate, Device, Hardware, Link

_MEMINFO = Path("/proc/meminfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES: Final = 1 << 60
"""Version 1 has no word for no limit: it gives the largest number of whole pages."""


def available_bytes() -> int:
    """The smallest of what the machine has available, what the control group leaves, and this group's part of it all.

    Pages of a cache are the kernel's until they are written, so that several groups would see the same memory free.
    """
    available, whole = (_meminfo_bytes(name) for name in ("MemAvailable", "MemTotal"))
    limit = _memory_limit()
    used = _read_number("memory.current", "memory/memory.usage_in_bytes")
    if limit is not None and used is not None:
        available, whole = min(available, max(0, limit - used + _reclaimable_bytes())), min(whole, limit)
    groups = os.environ.get(env.GROUPS_ON_MACHINE, "")
    return min(available, whole // max(1, int(groups if groups.isdigit() else 1)))


def host_identity() -> str:
    """Equal for processes of one machine, which share its cores and its clock."""
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else socket.gethostname()


def container_identity() -> str:
    """Equal for processes of one container, which share its limits; every pod has a host name of its own."""
    return f"{host_identity()}/{socket.gethostname()}"


def memory_identity() -> str:
    """Equal for processes that share memory: a machine's, or a container's where that has a limit of its own."""
    return host_identity() if _memory_limit() is None else container_identity()


def stage_threads(stages_on_host: int, stages_in_container: int) -> int:
    """Threads for one of the stages that share this machine and this container's CPU limit.

    `OMP_NUM_THREADS` bounds them too: stages don't know of other groups on their machine, but the operator may.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    bounds = [len(os.sched_getaffinity(0)) / stages_on_host]
    bounds += [int(asked)] if asked.isdigit() else []
    limit = _cpu_limit()
    bounds += [] if limit is None else [limit / stages_in_container]
    return max(1, int(min(bounds)))


def _cpu_limit() -> float | None:
    """Cores that the control group lets its processes use at once, in either version; None where there is no limit.

    A kernel schedules threads on all cores and stops them together once their time of a period is used up, so more
    threads than this only wait for each other.
    """
    try:
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
    except OSError:
        quota, period = (_read_text(_CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(quota) > 0 else None


def _memory_limit() -> int | None:
    """Bytes that the control group lets its processes hold, in either version; None where there is no limit."""
    limit = _read_number("memory.max", "memory/memory.limit_in_bytes")
    return None if limit is None or limit >= _UNLIMITED_BYTES else limit


def _meminfo_bytes(name: str) -> int:
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        found, _, rest = line.partition(":")
        if found == name:
            return int(rest.split()[0]) * 1024
    raise OSError(f"{_MEMINFO} names no {name}")


def _reclaimable_bytes() -> int:
    """File pages the kernel drops when memory is short; a freshly read checkpoint must not count as memory in use.

    Version 1 counts those of the group's children under a name of their own.
    """
    of_version_2 = _read_text(_CGROUP / "memory.stat")
    text = of_version_2 or _read_text(_CGROUP / "memory" / "memory.stat")
    name = "inactive_file " if of_version_2 else "total_inactive_file "
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))


def _read_number(*names: str) -> int | None:
    """The number in the first of these control files that is there; None where it says `max`, or none is there."""
    text = next((text for name in names if (text := _read_text(_CGROUP / name))), "")
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    """What a control file says; empty where it is missing."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


NAME: Final = "this machine"

LOOPBACK: Final = Link(bandwidth_bytes_per_second=2e9, latency_seconds=0.0001)
"""Gloo over the loopback device, an estimate."""


def this_machine(stage_count: int, ranks: int = 1) -> Hardware:
    """All stages on this host, sharing its memory and its cores evenly; each device is what one of its ranks gets."""
    cores = len(os.sched_getaffinity(0)) / (stage_count * ranks)
    rate = CPU_CORE.flops_per_second
    device = Device(
        name=NAME,
        memory_bytes=available_bytes(),
        memory_bandwidth_bytes_per_second=CPU_CORE.memory_bandwidth_bytes_per_second * cores,
        flops_per_second=ComputeRate(bfloat16=rate.bfloat16 * cores, float32=rate.float32 * cores),
        step_overhead_seconds=CPU_CORE.step_overhead_seconds,
        host=NAME,
    )
    return Hardware(devices=(device,) * stage_count, link=LOOPBACK)


MEMORY_EVENTS: Final = next(
    (path for path in (_CGROUP / "memory.events", _CGROUP / "memory" / "memory.oom_control") if path.exists()),
    _CGROUP / "memory.events",
)


def kernel_kills(events: Path = MEMORY_EVENTS) -> int:
    """How many processes of this container the kernel has ended for want of memory; 0 where it keeps no account."""
    try:
        lines = events.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
