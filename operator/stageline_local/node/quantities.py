"""Kubernetes quantities (`512Mi`, `2G`, `1500m`) as numbers, and the machine's memory."""

import re
from pathlib import Path
from typing import Final

_FACTORS: Final = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(m|k|[KMGTP]i?)?")


def parse_quantity(text: str | int | float) -> float:
    """Value of a quantity in its base unit (bytes, cores); raises `ValueError` naming what is wrong."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or (match[2] or "") not in _FACTORS:
        raise ValueError(f"{text!r} is not a Kubernetes quantity such as 512Mi, 2G or 500m")
    return float(match[1]) * _FACTORS[match[2] or ""]


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """`MemAvailable` of the machine: what new processes can take without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ValueError(f"{meminfo} has no MemAvailable line")


def format_bytes(count: float) -> str:
    """`1.5 GiB` style text for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
