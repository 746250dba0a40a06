"""What this side runs: versions of Stageline, Python, the system and the packages that matter."""

import platform
from importlib import metadata
from typing import Final

_PACKAGES: Final = (
    "stageline",
    "torch",
    "transformers",
    "fastapi",
    "uvicorn",
    "kubernetes",
    "kopf",
    "httpx",
    "pydantic",
)


def versions() -> dict[str, str]:
    """By name; a package that isn't installed here is said to be so."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed here"
    return found
