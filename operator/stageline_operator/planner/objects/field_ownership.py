"""Detects from `managedFields` whether an object still has the fields that the operator applied. Pure.

Server-side apply records which manager set each field. A user who edits one of our fields takes over its ownership. A
user who removes one leaves it without an owner. Either way the operator's entry shrinks. Fields that a user adds don't
change the entry and stay theirs. So no value is compared, and only the entry of an object has to be cached.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

_IDENTITY: Final = frozenset({"name", "namespace"})
_TYPE: Final = frozenset({"apiVersion", "kind"})


def owned_fields(metadata: Mapping[str, Any], manager: str) -> str | None:
    """The fields that `manager` applied and still owns, as `fieldsV1` JSON; None if the object has no such entry."""
    entries = metadata.get("managedFields")
    if entries is None:
        return None
    applied = (
        entry.get("fieldsV1") or {}
        for entry in entries
        if entry.get("manager") == manager and entry.get("operation") == "Apply" and not entry.get("subresource")
    )
    return json.dumps(next(applied, {}), separators=(",", ":"), sort_keys=True)


def owns_all_of(owned: str, manifest: Mapping[str, Any]) -> bool:
    """Whether `owned`, from `owned_fields`, covers every field of an applied manifest."""
    fields = json.loads(owned)
    wanted = {name: value for name, value in manifest.items() if name not in _TYPE}
    wanted["metadata"] = {name: value for name, value in manifest["metadata"].items() if name not in _IDENTITY}
    return bool(fields) and _covers(fields, wanted)


def _covers(owned: Mapping[str, Any], wanted: Any) -> bool:
    match wanted:
        case _ if not owned:
            return True  # no fields below: a scalar, or a list or map that is owned as a whole
        case Mapping():
            return all(f"f:{name}" in owned and _covers(owned[f"f:{name}"], value) for name, value in wanted.items())
        case list():
            return all(any(_names(key, item) and _covers(owned[key], item) for key in owned) for item in wanted)
        case _:
            return True


def _names(entry: str, item: Any) -> bool:
    """Whether an entry of an owned list belongs to this item: compare the key fields (one may be a default)."""
    kind, _, text = entry.partition(":")
    match kind, item:
        case "k", Mapping():
            return all(item.get(name, value) == value for name, value in json.loads(text).items())
        case "v", _:
            return bool(json.loads(text) == item)
        case _:
            return False
