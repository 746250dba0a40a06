"""Facts as JSON, YAML or plain text: field names with units, times in RFC 3339, null for unknown values."""

import io
import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import yaml
from rich.console import Console, RenderableType

from stageline_cli.on_call.facts.facts import Snapshot


def snapshot_document(snapshot: Snapshot) -> dict[str, Any]:
    document = dict(_plain(asdict(snapshot)))
    for model, facts in zip(document["models"], snapshot.models, strict=True):
        model["bubble"], model["tokens_per_second"] = facts.bubble, facts.tokens_per_second
    return document


def as_json(document: Any) -> str:
    return json.dumps(document, indent=2) + "\n"


def as_yaml(document: Any) -> str:
    return str(yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True))


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case Enum():
            return value.value
        case float():
            return round(value, 6)
        case _:
            return value


PAGE_WIDTH = 200


def text_page(parts: Iterable[RenderableType]) -> str:
    """One line per part, without colours."""
    console = Console(file=io.StringIO(), width=PAGE_WIDTH, highlight=False, color_system=None)
    for part in parts:
        console.print(part)
    written = console.file
    assert isinstance(written, io.StringIO)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"
