"""Inputs and outputs of `plan`.

The executor of a plan writes `status` first, then deletes, then applies: an incarnation is recorded before its pods
exist, and a failure before its evidence is deleted. A status conflict (another writer) ends the pass. An applied pod is
new: an existing pod with its name is the same pod.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from stageline_api import labels
from stageline_api.failures import FailureClass
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.stage_pods import GPU_RESOURCE

ObjectKey = tuple[str, str]
"""(kind, name) of an object in the model's namespace; the kind as `kind_of` returns it."""

POD_GROUP: Final = "PodGroup"
"""A kind that several schedulers define, each in its own API group."""
NATIVE_GROUP: Final = "scheduling.k8s.io"
"""Kubernetes' own API group for gangs."""


def kind_of(manifest: Mapping[str, Any]) -> str:
    """The manifest's kind, qualified by its API group if the kind is ambiguous: `PodGroup.scheduling.volcano.sh`."""
    kind = str(manifest["kind"])
    return f"{kind}.{manifest['apiVersion'].partition('/')[0]}" if kind == POD_GROUP else kind


class GroupPhase(StrEnum):
    CREATING = "Creating"
    """The incarnation is recorded; its pods are being created."""
    STARTING = "Starting"
    READY = "Ready"
    REPLACING = "Replacing"
    """The template changed: the old pods are being drained, then the next incarnation starts."""
    DRAINING = "Draining"
    """No longer wanted: its pods are being drained, then the group is removed."""
    TERMINATING = "Terminating"
    """A container failed: the rest of the incarnation is being deleted."""
    BACKING_OFF = "BackingOff"
    WAITING = "Waiting"
    """Only some of its stages found nodes; it released them and tries again."""
    FAILED = "Failed"
    """Down until the template changes."""


@dataclass(frozen=True)
class Peers:
    """Peers that may reach a model's pods, as pod labels and their namespace (None: any)."""

    pod_labels: Mapping[str, str]
    namespace: str | None = None


def component_peers(name: str, namespace: str | None = None) -> Peers:
    """The pods of `operator` or `gateway`, as the chart labels them."""
    return Peers({labels.APP_NAME: "stageline", labels.APP_COMPONENT: name}, namespace)


@dataclass(frozen=True)
class PodHost:
    """Properties of the nodes of stage pods."""

    gpu_resource: str = GPU_RESOURCE
    """Resource by which a container gets a GPU; empty if its processes use the machine's GPUs directly."""
    gpu_runtime_class: str = ""
    """Runtime class of GPU pods, unless their model names one; empty: the nodes' default."""
    root_is_read_only: bool = True
    """Whether containers have an image's read-only root without a home; false for processes in local mode."""


@dataclass(frozen=True)
class VllmImages:
    """Images of vLLM pods, unless their model names them."""

    stage: str = ""
    """vLLM's own image, without Stageline; empty: the default image, which then contains both."""
    files: str = ""
    """Stageline's image for the init container that provides the missing files; empty: the default image."""


ANY_PROMETHEUS: Final = ({"namespaceSelector": {}, "podSelector": {"matchLabels": {labels.APP_NAME: "prometheus"}}},)


@dataclass(frozen=True)
class Setting:
    """Settings shared by all models and passes."""

    default_image: str
    vllm_images: VllmImages = field(default_factory=VllmImages)
    gateway: Peers = field(default_factory=lambda: component_peers("gateway"))
    operator: Peers = field(default_factory=lambda: component_peers("operator"))
    metrics_from: tuple[Mapping[str, Any], ...] = ANY_PROMETHEUS
    """Peers that may read state and metrics of stages and engines besides the operator, as in a NetworkPolicy."""
    gateway_urls: Mapping[str, str] = field(default_factory=dict)
    """Base URL of the gateway that serves a namespace's models, by namespace."""
    tracing_env: Mapping[str, str] = field(default_factory=dict)
    """OTEL_* variables of engine containers, unless a model's template sets them."""
    pod_host: PodHost = field(default_factory=PodHost)


@dataclass(frozen=True)
class PodTrouble:
    """Why a kubelet can't create a pod's containers, as it reports it. `since` is None if unknown."""

    reason: str
    message: str
    since: datetime | None = None


@dataclass(frozen=True)
class PodRefusal:
    """Why the API server refuses to create a pod, as it reports it."""

    failure_class: FailureClass
    message: str
    since: datetime
    retry_at: datetime
    """When to try again; the group's other pods wait as well."""


@dataclass(frozen=True)
class Observed:
    """The observed state of one model. Pods and objects are those with the model's label.

    `status` must be the latest one written. The rest may lag, but must never go back in time.
    """

    status: PipelineModelStatus = field(default_factory=PipelineModelStatus)
    pods: Sequence[Mapping[str, Any]] = ()
    objects: frozenset[ObjectKey] = frozenset()
    layers_of_pod: Mapping[str, str] = field(default_factory=dict)
    """Layers that stages report (`0-14`), by pod name; it may be incomplete."""
    trouble_of_pod: Mapping[str, PodTrouble] = field(default_factory=dict)
    """What kubelets report on pods that wait for their containers, by pod name; it may be incomplete or outdated."""
    refused_pods: Mapping[str, PodRefusal] = field(default_factory=dict)
    """Pods that the API server refused to create, by name."""
    applied_hashes: Mapping[ObjectKey, str] = field(default_factory=dict)
    """Annotation `stageline.dev/applied-hash` of the objects that have one. An object with another hash than wanted is
    applied again; one that is not listed is left unchanged.
    """
    owned_fields: Mapping[ObjectKey, str] = field(default_factory=dict)
    """The fields that the operator applied to an object and still owns, as `field_ownership.owned_fields`. An object
    with fewer than wanted was edited and is applied again; one that is not listed is left unchanged.
    """
    revision_specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The spec that each revision was made from, by revision: `spec.json` of the revision's ConfigMap. A group of an
    old revision is recreated from it.
    """
    lost_nodes: frozenset[str] = frozenset()
    """Nodes that are gone, or whose kubelet the control plane has given up on, as `node_losses` decides. Their pods
    count as ended and are deleted without waiting for the kubelet.
    """
    unheard_nodes: frozenset[str] = frozenset()
    """Nodes that are unreachable but don't count as lost, at least not yet. Their pods may keep serving and are left
    unchanged. A pod that was ready at its node's last report counts as serving.
    """
    unheard_why: str = ""
    """What must happen before unheard nodes count as lost, as a sentence."""
    refusal: str = ""
    """Why the API server refused an object, other than a pod, that the last pass wanted."""
    unchangeable: frozenset[ObjectKey] = frozenset()
    """Existing objects that the API server doesn't allow to change as the last pass wanted."""
    sees_nodes: bool = True
    """Whether the observer can read nodes; if not, lost nodes are derived from the pods."""


@dataclass(frozen=True)
class Deletion:
    """One object to delete. `grace_seconds` None uses the object's own; 0 doesn't wait for the kubelet."""

    kind: str
    name: str
    grace_seconds: float | None = None


@dataclass(frozen=True)
class PlannedEvent:
    """One Kubernetes Event on the PipelineModel."""

    type: str
    """`Normal` or `Warning`."""
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """One step. `requeue_after_seconds` None waits for the next change."""

    status: PipelineModelStatus
    apply: tuple[dict[str, Any], ...] = ()
    delete: tuple[Deletion, ...] = ()
    requeue_after_seconds: float | None = None
    events: tuple[PlannedEvent, ...] = ()
    needed_by: Mapping[ObjectKey, frozenset[int]] = field(default_factory=dict)
    """Groups whose pods need an object, by index: they wait while it is created. An object that isn't listed is needed
    by all.
    """
