"""Which metrics a PromQL expression or a page of text names, and which the shipped rules make."""

import re
from functools import cache
from typing import Any, Final

import yaml

from stageline_dashboards.shipped import rule_paths

_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_:]*")


@cache
def shipped_groups() -> tuple[dict[str, Any], ...]:
    """Every group of rules, in the order of files."""
    files = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in rule_paths())
    return tuple(group for file in files for group in file["groups"])


@cache
def shipped_rules() -> tuple[dict[str, Any], ...]:
    """Every rule, recording and alerting, in the order of files and groups."""
    return tuple(rule for group in shipped_groups() for rule in group["rules"])


def recorded_names() -> frozenset[str]:
    """What the recording rules make."""
    return frozenset(rule["record"] for rule in shipped_rules() if "record" in rule)


def exported_in(text: str) -> frozenset[str]:
    """Names of metrics that only an exporter of Stageline's can make."""
    return frozenset(name for name in _NAME.findall(text) if name.startswith("stageline_") and ":" not in name)


def recorded_in(text: str) -> frozenset[str]:
    """Names that only a recording rule can make: a level, a metric or Stageline itself as the level, and operations."""
    found = (name.strip(":").split(":") for name in _NAME.findall(text))
    return frozenset(
        ":".join(parts)
        for parts in found
        if len(parts) == 3 and (parts[0] == "stageline" or parts[1].startswith("stageline_"))
    )
