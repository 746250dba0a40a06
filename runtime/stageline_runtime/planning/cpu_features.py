"""What this machine's CPU can compute, as the kernel lists it in `/proc/cpuinfo`."""

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
_FIELDS = ("flags", "Features")
"""x86 and ARM."""
_BFLOAT16_UNITS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""Each of these multiplies bfloat16 numbers; without one, torch's products in bfloat16 take four to six times as long
as in float32 (AVX2, 8 to 512 rows)."""


def cpu_features() -> frozenset[str]:
    """The first CPU's features; empty where the kernel lists none."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    fields = (line.partition(":") for line in lines)
    return next((frozenset(words.split()) for name, _, words in fields if name.strip() in _FIELDS), frozenset())


def has_bfloat16_units(features: frozenset[str]) -> bool:
    return not _BFLOAT16_UNITS.isdisjoint(features)
