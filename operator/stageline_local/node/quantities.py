"""The machine's memory, and human-readable sizes."""

from pathlib import Path


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """`MemAvailable` of the machine: memory for new processes without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ValueError(f"{meminfo} has no MemAvailable line")


def format_bytes(count: float) -> str:
    """A size such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
