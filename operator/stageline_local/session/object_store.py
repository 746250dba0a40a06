"""The objects of local mode, in memory: an API server's content except pods, which the node holds."""

import copy
from collections.abc import Mapping
from typing import Any


class ObjectStore:
    """ConfigMaps, Secrets and Services by kind, namespace and name. Implements `mounts.ObjectLookup`."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], dict[str, Any]] = {}

    def apply(self, manifest: Mapping[str, Any]) -> None:
        metadata = manifest["metadata"]
        key = (manifest["kind"], metadata.get("namespace", "default"), metadata["name"])
        self._objects[key] = copy.deepcopy(dict(manifest))

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object; a missing one is no error."""
        self._objects.pop((kind, namespace, name), None)

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self._objects.get((kind, namespace, name))

    def labelled(self, namespace: str, key: str, value: str) -> list[tuple[str, str]]:
        """(kind, name) of the objects of a namespace with the label `key`=`value`."""
        return [
            (kind, name)
            for (kind, own_namespace, name), each in self._objects.items()
            if own_namespace == namespace and each["metadata"].get("labels", {}).get(key) == value
        ]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [each for (own_kind, _, _), each in self._objects.items() if own_kind == kind]
