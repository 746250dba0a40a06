"""Kubernetes quantities (`512Mi`, `2G`, `1500m`) as numbers."""

import re
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
    """Value of a quantity in its base unit (bytes, cores); raises `ValueError` with the reason."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or (match[2] or "") not in _FACTORS:
        raise ValueError(f"{text!r} is not a Kubernetes quantity such as 512Mi, 2G or 500m")
    return float(match[1]) * _FACTORS[match[2] or ""]
