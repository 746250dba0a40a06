"""Cache of the newest version of each object, from watches, lists and own writes.

An older version never replaces a newer one, so the operator always sees its own writes. A late event of a deleted uid
does not restore the object. Only used fields are kept. Belongs to one event loop.
"""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from stageline_api.resource import pipeline_model
from stageline_operator.controller.client.resources import ModelKey, ObjectId, id_of, model_key_of
from stageline_operator.controller.settings import FIELD_MANAGER
from stageline_operator.planner.objects.field_ownership import owned_fields
from stageline_operator.planner.observed.node_losses import Taints, is_silent
from stageline_operator.planner.observed.observed_objects import OWNED_FIELDS
from stageline_operator.planner.observed.observed_pod import spec_to_keep

_REMEMBERED_DELETIONS: Final = 10_000

_log = logging.getLogger(__name__)
Manifest = Mapping[str, Any]


class ObjectCache:
    """Objects by identity, and by their model. `on_change` is called with the model of each change."""

    def __init__(self, on_change: Callable[[ModelKey], None] = lambda _: None) -> None:
        self._objects: dict[ObjectId, Manifest] = {}
        self._of_model: dict[ModelKey, set[ObjectId]] = defaultdict(set)
        self.taints_of_nodes: dict[str, Taints] = {}
        """Taints of every node, while nodes are watched."""
        self.silent_nodes: set[str] = set()
        """Nodes with an unreachable kubelet."""
        self._deleted_uids: OrderedDict[str, None] = OrderedDict()
        self._on_change = on_change

    def get(self, identity: ObjectId) -> Manifest | None:
        return self._objects.get(identity)

    def model(self, key: ModelKey) -> Manifest | None:
        return self._objects.get(ObjectId(pipeline_model.KIND, key.namespace, key.name))

    def of_model(self, key: ModelKey) -> Iterator[tuple[ObjectId, Manifest]]:
        """All objects with the model's label."""
        for identity in sorted(self._of_model.get(key, ())):
            yield identity, self._objects[identity]

    def of_kind(self, kind: str) -> Iterator[tuple[ObjectId, Manifest]]:
        for identity, manifest in list(self._objects.items()):
            if identity.kind == kind:
                yield identity, manifest

    def model_keys(self) -> list[ModelKey]:
        """All PipelineModels, and deleted ones that still have objects."""
        own = {ModelKey(identity.namespace, identity.name) for identity, _ in self.of_kind(pipeline_model.KIND)}
        return sorted(own | {key for key, members in self._of_model.items() if members})

    def put(self, kind: str, manifest: Manifest) -> bool:
        """Store a version; returns False if it is not newer than the stored one."""
        if not _is_sound(kind, manifest):
            return False
        identity, metadata = id_of(kind, manifest), manifest["metadata"]
        known = self._objects.get(identity)
        if metadata.get("uid") in self._deleted_uids:
            return False
        if known is not None and version_of(manifest) <= version_of(known):
            return False
        self._forget(identity)
        self._objects[identity] = _kept(kind, manifest)
        if kind == "Node":
            self._keep_taints(identity.name, self._objects[identity])
        if (key := _member_of(kind, manifest)) is not None:
            self._of_model[key].add(identity)
        self._tell(kind, identity, known, manifest)
        return True

    def remove(self, kind: str, manifest: Manifest) -> bool:
        """Drop a deleted object; a deletion with another uid, of an earlier object of that name, changes nothing."""
        if not _is_sound(kind, manifest):
            return False
        identity, uid = id_of(kind, manifest), manifest["metadata"].get("uid")
        if uid is not None:
            self._deleted_uids[uid] = None
            while len(self._deleted_uids) > _REMEMBERED_DELETIONS:
                self._deleted_uids.popitem(last=False)
        known = self._objects.get(identity)
        if known is None or known["metadata"].get("uid") != uid:
            return False
        self._forget(identity)
        self._tell(kind, identity, known, None)
        return True

    def replace(
        self, kind: str, namespace: str, listed: Sequence[Manifest], version: int, key: ModelKey | None = None
    ) -> int:
        """Merge a full list of a kind (of one namespace unless empty, of one model if `key` is given).

        A cached object that is not listed and not newer than the list's `version` is dropped. Returns how many objects
        were unknown or gone; a newer version of a known one may just be in flight.
        """
        listed = [each for each in listed if _is_sound(kind, each)]
        names = {id_of(kind, each) for each in listed}
        unknown = names - self._objects.keys()
        for each in listed:
            self.put(kind, each)
        wrong = len(unknown)
        for identity, known in self.of_kind(kind):
            if identity in names or namespace not in ("", identity.namespace) or version_of(known) > version:
                continue
            if key is None or _member_of(kind, known) == key:
                wrong += self.remove(kind, known)
        return wrong

    def forget_namespace(self, namespace: str) -> None:
        """Drop the objects of an unreadable namespace; those that still exist may be put again later."""
        for identity in [each for each in self._objects if each.namespace == namespace]:
            self._forget(identity)

    def _forget(self, identity: ObjectId) -> None:
        known = self._objects.pop(identity, None)
        if identity.kind == "Node":
            self.taints_of_nodes.pop(identity.name, None)
            self.silent_nodes.discard(identity.name)
        if known is not None and (key := _member_of(identity.kind, known)) is not None:
            self._of_model[key].discard(identity)
            if not self._of_model[key]:
                del self._of_model[key]

    def _keep_taints(self, name: str, node: Manifest) -> None:
        self.taints_of_nodes[name] = node["spec"]["taints"]
        if is_silent(self.taints_of_nodes[name]):
            self.silent_nodes.add(name)

    def _tell(self, kind: str, identity: ObjectId, before: Manifest | None, after: Manifest | None) -> None:
        keys = {_member_of(kind, each) for each in (before, after) if each is not None}
        if kind == pipeline_model.KIND:
            keys.add(ModelKey(identity.namespace, identity.name))
        if kind == "Node" and _taints(before) != _taints(after):
            pods = (pod for _, pod in self.of_kind("Pod") if pod.get("spec", {}).get("nodeName") == identity.name)
            keys |= {_member_of("Pod", pod) for pod in pods}
        for key in keys - {None}:
            if key is not None:
                self._on_change(key)


def _member_of(kind: str, manifest: Manifest) -> ModelKey | None:
    return None if kind in (pipeline_model.KIND, "Node") else model_key_of(manifest)


def _is_sound(kind: str, manifest: Manifest) -> bool:
    """Whether an object can be parsed; a malformed one affects no other."""
    try:
        identity = id_of(kind, manifest)
        version_of(manifest), _member_of(kind, manifest), _kept(kind, manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _log.warning("ignored a malformed %s: %s: %s", kind, type(error).__name__, error)
        return False
    return all(isinstance(each, str) for each in identity)


def _taints(node: Manifest | None) -> set[tuple[str | None, str | None]] | None:
    """Keys and effects of a node's taints; None if there is no node."""
    if node is None:
        return None
    return {(taint.get("key"), taint.get("effect")) for taint in node.get("spec", {}).get("taints") or []}


def version_of(manifest: Manifest) -> int:
    """resourceVersion as a number: it increases over all objects of a resource, also when a name is reused."""
    return int(manifest["metadata"].get("resourceVersion") or 0)


def _kept(kind: str, manifest: Manifest) -> Manifest:
    """The manifest without `managedFields` and other unused fields, which are most of its size."""
    kept = {name: value for name, value in manifest.items() if name != "metadata"}
    kept["metadata"] = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    match kind.partition(".")[0]:
        case "Pod":
            kept["spec"] = spec_to_keep(manifest.get("spec", {}))
        case "Node":
            identity = {name: manifest["metadata"].get(name) for name in ("name", "uid", "resourceVersion")}
            kept = {"metadata": identity, "spec": {"taints": manifest.get("spec", {}).get("taints") or []}}
        case "ConfigMap":
            kept = {"metadata": kept["metadata"], "data": kept.get("data") or {}}
        case "Service" | "PodDisruptionBudget" | "NetworkPolicy" | "PodGroup":
            owned = owned_fields(manifest["metadata"], FIELD_MANAGER)
            kept = {"metadata": kept["metadata"]} | ({} if owned is None else {OWNED_FIELDS: owned})
    return kept
