"""Inputs and outputs of `plan`.

Whoever executes a plan writes `status` first, then deletes, then applies: an incarnation is on record before its pods
exist, and a failure is on record before its evidence is deleted. A status that can't be written (somebody else wrote
meanwhile) ends the pass. A pod that is applied is new: one that exists already under its name is the same pod.
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
"""(kind, name) of an object in the model's namespace; the kind as `kind_of` tells it."""

POD_GROUP: Final = "PodGroup"
"""A kind that several schedulers have, each in an API group of its own."""
NATIVE_GROUP: Final = "scheduling.k8s.io"
"""Kubernetes' own API group of gangs."""


def kind_of(manifest: Mapping[str, Any]) -> str:
    """The manifest's kind, with its API group where the kind alone is not one: `PodGroup.scheduling.volcano.sh`."""
    kind = str(manifest["kind"])
    return f"{kind}.{manifest['apiVersion'].partition('/')[0]}" if kind == POD_GROUP else kind


class GroupPhase(StrEnum):
    CREATING = "Creating"
    """The incarnation is on record; its pods are being made."""
    STARTING = "Starting"
    READY = "Ready"
    REPLACING = "Replacing"
    """The template changed: the old pods are being drained; the next incarnation takes their place."""
    DRAINING = "Draining"
    """Not wanted any more: its pods are being drained, then it is gone."""
    TERMINATING = "Terminating"
    """A container failed: what is left of the incarnation is being deleted."""
    BACKING_OFF = "BackingOff"
    WAITING = "Waiting"
    """It found nodes for some of its stages only and gave them back; it tries again."""
    FAILED = "Failed"
    """Left down until the template changes."""


@dataclass(frozen=True)
class Peers:
    """Who may reach a model's pods from outside, as pod labels and the namespace that holds them (None: any)."""

    pod_labels: Mapping[str, str]
    namespace: str | None = None


def component_peers(name: str, namespace: str | None = None) -> Peers:
    """The pods of `operator` or `gateway`, as the chart labels them."""
    return Peers({labels.APP_NAME: "stageline", labels.APP_COMPONENT: name}, namespace)


@dataclass(frozen=True)
class PodHost:
    """What the nodes of stage pods are like."""

    gpu_resource: str = GPU_RESOURCE
    """Resource by which a container gets a GPU; empty where its processes see the machine's own."""
    gpu_runtime_class: str = ""
    """Runtime class of pods that use GPUs and whose model names none; empty: the nodes' default."""
    root_is_read_only: bool = True
    """Whether containers have an image's root, read-only and without a home; not so for processes of a machine."""


@dataclass(frozen=True)
class VllmImages:
    """Images of pods that run vLLM, where their model names none."""

    stage: str = ""
    """vLLM's own, without Stageline in it; empty: the default image, which then holds both."""
    files: str = ""
    """Stageline's, of the init container that brings what vLLM's own lacks; empty: the default image."""


ANY_PROMETHEUS: Final = ({"namespaceSelector": {}, "podSelector": {"matchLabels": {labels.APP_NAME: "prometheus"}}},)


@dataclass(frozen=True)
class Setting:
    """What is the same for every model and every pass."""

    default_image: str
    vllm_images: VllmImages = field(default_factory=VllmImages)
    gateway: Peers = field(default_factory=lambda: component_peers("gateway"))
    operator: Peers = field(default_factory=lambda: component_peers("operator"))
    metrics_from: tuple[Mapping[str, Any], ...] = ANY_PROMETHEUS
    """Who may read what stages and engines say of themselves besides the operator: peers of a NetworkPolicy."""
    gateway_urls: Mapping[str, str] = field(default_factory=dict)
    """Base URL of the gateway that serves a namespace's models, by namespace."""
    tracing_env: Mapping[str, str] = field(default_factory=dict)
    """OTEL_* variables of engine containers, where a model's template doesn't set them itself."""
    pod_host: PodHost = field(default_factory=PodHost)


@dataclass(frozen=True)
class PodTrouble:
    """What keeps a kubelet from making a pod's containers, in its words. `since` is None where nobody says."""

    reason: str
    message: str
    since: datetime | None = None


@dataclass(frozen=True)
class PodRefusal:
    """Why the API server does not let a pod be made, in its words."""

    failure_class: FailureClass
    message: str
    since: datetime
    retry_at: datetime
    """When to try again; the group's other pods wait as well."""


@dataclass(frozen=True)
class Observed:
    """Everything seen of one model. Pods and objects are those labelled with the model's name.

    `status` must be the latest that was written; the rest may lag, but must never go back in time.
    """

    status: PipelineModelStatus = field(default_factory=PipelineModelStatus)
    pods: Sequence[Mapping[str, Any]] = ()
    objects: frozenset[ObjectKey] = frozenset()
    layers_of_pod: Mapping[str, str] = field(default_factory=dict)
    """What stages report of themselves (`0-14`), by pod name; it may be incomplete."""
    trouble_of_pod: Mapping[str, PodTrouble] = field(default_factory=dict)
    """What kubelets say of pods that wait for their containers, by pod name; it may be incomplete, or out of date."""
    refused_pods: Mapping[str, PodRefusal] = field(default_factory=dict)
    """Pods that were to be made and were refused, by name."""
    applied_hashes: Mapping[ObjectKey, str] = field(default_factory=dict)
    """Annotation `stageline.dev/applied-hash` of the objects that carry one; an object whose hash differs from what is
    wanted is applied again, one that is not listed here is left as it is."""
    owned_fields: Mapping[ObjectKey, str] = field(default_factory=dict)
    """What the operator applied to an object and still owns, as `field_ownership.owned_fields`; an object of which
    that is less than what is wanted was edited, and is applied again. One that is not listed here is left as it is."""
    revision_specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Spec that each revision was made from, by revision: `spec.json` of the ConfigMap that carries the revision's
    label. A group that keeps an old revision can be made again from it."""
    lost_nodes: frozenset[str] = frozenset()
    """Nodes that are gone, or whose kubelet the control plane has given up on, as `node_losses` tells. Their pods count
    as dead, and are deleted without waiting for the kubelet."""
    unheard_nodes: frozenset[str] = frozenset()
    """Nodes that can't be reached and don't count as lost, or not yet. Their pods may serve on: nothing is done to
    them, and a pod that was ready when its node was last heard of counts as serving."""
    unheard_why: str = ""
    """What is waited for before unheard nodes count as lost, as a sentence."""
    refusal: str = ""
    """Why the API server refused an object other than a pod that the last pass wanted, in its words."""
    unchangeable: frozenset[ObjectKey] = frozenset()
    """Objects that exist and that the API server doesn't let become what the last pass wanted."""
    sees_nodes: bool = True
    """Whether whoever observes would know of a lost node; if not, it is told from the pods."""


@dataclass(frozen=True)
class Deletion:
    """One object to delete. `grace_seconds` None leaves it to the object; 0 doesn't wait for the kubelet at all."""

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
    """Groups whose pods need an object, by index, and wait while it is made or made again; all of them where it isn't
    listed here."""
