"""Facts as JSON values, for scripts: field names with units, moments in RFC 3339, None where something is not known."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import yaml

from stageline_cli.on_call.facts.facts import Snapshot


def snapshot_document(snapshot: Snapshot) -> dict[str, Any]:
    """The whole snapshot as JSON values."""
    document = dict(_plain(asdict(snapshot)))
    for model, facts in zip(document["models"], snapshot.models, strict=True):
        model["bubble"], model["tokens_per_second"] = facts.bubble, facts.tokens_per_second
    return document


def as_json(document: Any) -> str:
    """JSON for people and programs."""
    return json.dumps(document, indent=2) + "\n"


def as_yaml(document: Any) -> str:
    """The same in YAML."""
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
