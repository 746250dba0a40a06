"""Whether an object still says what was applied, read from who owns its fields. Pure.

Server-side apply writes down who set each field. A person who edits one of ours takes it over, and one who removes it
leaves it without an owner, so that the operator's entry gets smaller. What a person adds beside our fields leaves the
entry as it is, and stays theirs. So no value is compared, and nothing but the entry has to be kept of an object.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

_IDENTITY: Final = frozenset({"name", "namespace"})
_TYPE: Final = frozenset({"apiVersion", "kind"})


def owned_fields(metadata: Mapping[str, Any], manager: str) -> str | None:
    """What `manager` applied and still owns, as `fieldsV1` in JSON; None where the object doesn't say who owns what."""
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
    """Whether `owned`, as `owned_fields` gives it, covers every field of a manifest that was applied."""
    fields = json.loads(owned)
    wanted = {name: value for name, value in manifest.items() if name not in _TYPE}
    wanted["metadata"] = {name: value for name, value in manifest["metadata"].items() if name not in _IDENTITY}
    return bool(fields) and _covers(fields, wanted)


def _covers(owned: Mapping[str, Any], wanted: Any) -> bool:
    match wanted:
        case _ if not owned:
            return True  # nothing below: a scalar, or a list or map that is owned as one
        case Mapping():
            return all(f"f:{name}" in owned and _covers(owned[f"f:{name}"], value) for name, value in wanted.items())
        case list():
            return all(any(_names(key, item) and _covers(owned[key], item) for key in owned) for item in wanted)
        case _:
            return True


def _names(entry: str, item: Any) -> bool:
    """Whether an entry of a list is this item's: by the fields that are its key (a default may be among them)."""
    kind, _, text = entry.partition(":")
    match kind, item:
        case "k", Mapping():
            return all(item.get(name, value) == value for name, value in json.loads(text).items())
        case "v", _:
            return bool(json.loads(text) == item)
        case _:
            return False
