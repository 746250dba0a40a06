"""Merges `spec.template.podTemplate` into a stage pod, like a strategic merge patch. Pure.

Mappings are merged. Lists with a merge key are merged by it; other lists are concatenated. Of two values the overlay's
wins. Validation rejects overlays of what Stageline sets (`resource.pod_template`): the overlay can't remove or rename
its containers, volumes, labels, ports, probes or commands.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

MERGE_KEYS: Final[Mapping[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "resourceClaims": "name",
    "claims": "name",
    "hostAliases": "ip",
}
"""The merge key of each list, as in Kubernetes."""
_REPLACED: Final = frozenset({"supplementalGroups", "command", "args"})
"""Lists that are replaced as a whole."""


def with_overlay(pod: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`pod` with `overlay` merged in; the arguments are not changed."""
    merged = _merged(pod, overlay)
    spec = merged["spec"]
    if spec.get("hostNetwork"):
        # The default policy would use the node's resolver, which knows no Service and no other stage.
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    return merged


def _merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in overlay.items():
        result[name] = _value(name, result.get(name), value)
    return result


def _value(name: str, base: Any, overlay: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        return _merged(base, overlay)
    if isinstance(base, Sequence) and isinstance(overlay, Sequence) and not isinstance(overlay, str):
        if (key := MERGE_KEYS.get(name)) is not None:
            return _by_key(base, overlay, key)
        return list(overlay) if name in _REPLACED else [*base, *(each for each in overlay if each not in base)]
    return overlay


def _by_key(base: Sequence[Any], overlay: Sequence[Any], key: str) -> list[Any]:
    entries = {each[key]: each for each in base}
    for each in overlay:
        known = entries.get(each.get(key))
        # A variable's value and its source exclude each other: the overlay's replaces either.
        if known is None or "value" in known or "valueFrom" in known:
            entries[each.get(key)] = dict(each)
        else:
            entries[each.get(key)] = _merged(known, each)
    return list(entries.values())
