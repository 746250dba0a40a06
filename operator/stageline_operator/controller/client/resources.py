"""The kinds of objects that the operator uses, their API paths and the allowed verbs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from stageline_api import labels
from stageline_api.resource import pipeline_model
from stageline_kubernetes.resources import ApiResource
from stageline_operator.planner.types import NATIVE_GROUP

OWNED_SELECTOR: Final = f"{labels.APP_MANAGED_BY}=stageline-operator"
"""Label selector of all objects that belong to PipelineModels."""


class ModelKey(NamedTuple):
    """Namespace and name of a PipelineModel."""

    namespace: str
    name: str


class ObjectId(NamedTuple):
    """One object of any kind; `namespace` is empty for nodes."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Resource(ApiResource):
    """One kind that the operator uses. `verbs` are exactly those that it uses and that its role grants."""

    verbs: tuple[str, ...]

    @property
    def is_watched(self) -> bool:
        """Whether the operator caches objects of this kind."""
        return "watch" in self.verbs

    @property
    def selector(self) -> str:
        """Label selector of the objects to watch; empty selects all."""
        return "" if self.kind in (pipeline_model.KIND, "Node") else OWNED_SELECTOR


_READ = ("get", "list", "watch")
_APPLIED_UNWATCHED = ("get", "list", "create", "patch", "delete")
_APPLIED = ("get", "list", "watch", "create", "patch", "delete")

PIPELINE_MODEL: Final = Resource(
    pipeline_model.KIND, pipeline_model.GROUP, pipeline_model.VERSION, pipeline_model.PLURAL, _READ
)
POD: Final = Resource("Pod", "", "v1", "pods", ("list", "watch", "create", "delete"))
CONFIG_MAP: Final = Resource("ConfigMap", "", "v1", "configmaps", _APPLIED)
SERVICE: Final = Resource("Service", "", "v1", "services", _APPLIED)
# Only created: the response to a patch contains the whole Secret, so the right to patch is a right to read.
SECRET: Final = Resource("Secret", "", "v1", "secrets", ("create",))
CACHE_CLAIM: Final = Resource("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims", _APPLIED)
DISRUPTION_BUDGET: Final = Resource("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets", _APPLIED)
NETWORK_POLICY: Final = Resource("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies", _APPLIED)
NODE: Final = Resource("Node", "", "v1", "nodes", _READ, namespaced=False)
# Kinds of schedulers that may be missing, or be installed and removed while the operator runs. They are never watched:
# a failing watch would make the operator unready. They are listed before one is deleted.
VOLCANO_POD_GROUP: Final = Resource(
    "PodGroup.scheduling.volcano.sh", "scheduling.volcano.sh", "v1beta1", "podgroups", _APPLIED_UNWATCHED
)
KAI_POD_GROUP: Final = Resource(
    "PodGroup.scheduling.run.ai", "scheduling.run.ai", "v2alpha2", "podgroups", _APPLIED_UNWATCHED
)
NATIVE_POD_GROUP: Final = Resource(f"PodGroup.{NATIVE_GROUP}", NATIVE_GROUP, "v1beta1", "podgroups", _APPLIED_UNWATCHED)
POD_GROUPS: Final = {"volcano": VOLCANO_POD_GROUP, "kai": KAI_POD_GROUP, "kubernetes": NATIVE_POD_GROUP}
"""By `placement.gang.scheduler`."""
EVENT: Final = Resource("Event", "events.k8s.io", "v1", "events", ("list", "create", "patch"))
LEASE: Final = Resource("Lease", "coordination.k8s.io", "v1", "leases", ("get", "create", "update"))

RESOURCES: Final[tuple[Resource, ...]] = (
    PIPELINE_MODEL,
    POD,
    CONFIG_MAP,
    SERVICE,
    SECRET,
    CACHE_CLAIM,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    *POD_GROUPS.values(),
    NODE,
    EVENT,
    LEASE,
)
RESOURCE_OF_KIND: Final[Mapping[str, Resource]] = {each.kind: each for each in RESOURCES}
"""By kind as `planner.types.kind_of` returns it."""
WATCHED: Final = tuple(each for each in RESOURCES if each.is_watched)


class Place(NamedTuple):
    """One kind in one namespace. The empty namespace means all namespaces, or none for nodes."""

    resource: Resource
    namespace: str

    def __str__(self) -> str:
        name = self.resource.plural + (f".{self.resource.group}" if self.resource.group else "")
        return f"{name} in namespace {self.namespace}" if self.namespace else name


def id_of(kind: str, manifest: Mapping[str, Any]) -> ObjectId:
    metadata = manifest["metadata"]
    return ObjectId(kind, metadata.get("namespace", ""), metadata["name"])


def model_key_of(manifest: Mapping[str, Any]) -> ModelKey | None:
    """The model that an object's label names; None if it has no such label."""
    metadata = manifest["metadata"]
    name = (metadata.get("labels") or {}).get(labels.MODEL)
    return None if name is None else ModelKey(metadata.get("namespace", ""), name)


def controller_of(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    owners = manifest["metadata"].get("ownerReferences") or ()
    return next((each for each in owners if each.get("controller")), None)
