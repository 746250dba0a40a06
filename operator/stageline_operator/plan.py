"""What goes into planning and what comes out of it.

Whoever executes a plan writes `status` first, then deletes, then applies: an incarnation is on record before its pods
exist, and a failure is on record before its evidence is deleted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from stageline_api.pipeline_model import PipelineModel
from stageline_api.spec_status import PipelineModelStatus

ObjectKey = tuple[str, str]
"""(kind, name) of an object in the model's namespace."""


class GroupPhase(StrEnum):
    """Where a group is in its life."""

    CREATING = "Creating"
    """The incarnation is on record; its pods are being made."""
    STARTING = "Starting"
    READY = "Ready"
    REPLACING = "Replacing"
    """The template changed: the old pods are being drained."""
    TERMINATING = "Terminating"
    """A container failed: what is left of the incarnation is being deleted."""
    BACKING_OFF = "BackingOff"
    FAILED = "Failed"
    """Left down until the spec changes."""


@dataclass(frozen=True)
class Setting:
    """What is the same for every model and every pass."""

    default_image: str


@dataclass(frozen=True)
class Observed:
    """Everything seen of one model. Pods and objects are those labelled with the model's name.

    `layers_of_pod` holds what stages report of themselves (`0-14`), by pod name; it may be incomplete.
    """

    status: PipelineModelStatus = field(default_factory=PipelineModelStatus)
    pods: Sequence[Mapping[str, Any]] = ()
    objects: frozenset[ObjectKey] = frozenset()
    layers_of_pod: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Deletion:
    """One object to delete; `grace_seconds` None leaves it to the object."""

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


@dataclass(frozen=True)
class Context:
    """The inputs of one pass, as the parts of the planner share them."""

    model: PipelineModel
    setting: Setting
    observed: Observed
    now: datetime
    revision: str
    spec_changed: bool
    """The spec's generation is not the one the status was written for."""
