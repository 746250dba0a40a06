"""Finds the boards and rules that are installed with Stageline; reads no other files and never writes."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(str(resources.files("stageline_dashboards")))


def board_paths() -> Iterator[Path]:
    """Every Grafana dashboard (JSON), by name."""
    yield from sorted((_PACKAGE / "boards").glob("*.json"))


def rule_paths() -> Iterator[Path]:
    """Every file of Prometheus recording and alerting rules (YAML), by name."""
    yield from sorted((_PACKAGE / "rules").glob("*.yaml"))
