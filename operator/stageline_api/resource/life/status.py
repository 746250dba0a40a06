"""`status` of a PipelineModel: the operator's observations, and bookkeeping that survives its restart.

Write it with `StatusBase.to_manifest()`. The operator has no other memory, so a group's incarnation, restart times and
back-off are written here before its pods are created.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel

from stageline_api.failures import FailureClass


def _timestamp_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


Timestamp = Annotated[AwareDatetime, PlainSerializer(_timestamp_text, when_used="json")]
"""A UTC time in RFC 3339 with microseconds."""


class StatusBase(BaseModel):
    """Base of the types that Stageline writes. Unknown fields are ignored, so that a newer operator's status can be
    read.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    def to_manifest(self) -> dict[str, Any]:
        """The status as JSON values under Kubernetes' names, without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Condition(StatusBase):
    """A condition in metav1 form."""

    type: str = Field(max_length=316, description="Available, Progressing, Degraded, Ready or Stalled.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    observed_generation: int | None = Field(
        default=None, description=("Generation of the spec that this condition is about.")
    )
    last_transition_time: Timestamp = Field(description="When `status` last changed.")
    reason: str = Field(max_length=1024, description="Reason, as one CamelCase word.")
    message: str = Field(default="", max_length=32_768, description="Explanation as a sentence.")


class StageObserved(StatusBase):
    """One stage of one group, as last seen."""

    index: int = Field(description="Position in the pipeline, from 0.")
    pod: str = Field(default="", description="Name of its pod.")
    node: str = Field(default="", description="Node of the pod; empty until it is scheduled.")
    layers: str = Field(
        default="", description=("Layers it holds, as first-last; empty until the engine has cut the model.")
    )
    ready: bool = Field(default=False, description="Whether it has loaded and the whole pipeline has answered.")
    reason: str = Field(default="", description="Why it is not ready, as one CamelCase word.")
    message: str = Field(
        default="",
        description=("What the stage is doing, or why it is not ready, in the scheduler's or kubelet's words."),
    )
    since: Timestamp | None = Field(default=None, description="When it began to wait, if known.")


class GroupStatus(StatusBase):
    """One copy of the pipeline."""

    index: int = Field(description="Number of the group, from 0.")
    incarnation: int = Field(
        description=("Number of times the group's pods have been created, from 1; a label of every pod.")
    )
    revision: str = Field(default="", description="Hash of the template that its pods were made from.")
    phase: str = Field(
        default="",
        description=("Creating, Starting, Ready, Terminating, BackingOff, Failed, Replacing, Draining or Waiting."),
    )
    since: Timestamp | None = Field(default=None, description="When it entered this phase.")
    image: str = Field(default="", description="Image of its pods if the template names none.")
    vllm_image: str | None = Field(
        default=None, description="Image of its stages under vLLM if the model names none; empty: `image`."
    )
    vllm_files_image: str | None = Field(
        default=None,
        description=(
            "Image of the init container that brings Stageline to vLLM's image, if the template names "
            "none; empty: `image`."
        ),
    )
    attempts: int = Field(default=0, description="Consecutive incarnations that ended before they were ready.")
    served: bool = Field(default=False, description="Whether it was ever ready at its revision.")
    restarts: tuple[Timestamp, ...] = Field(
        default=(),
        description="Times of its failures within the restart window.",
    )
    backoff_until: Timestamp | None = Field(default=None, description="Its next restart is not earlier than this.")
    stages: tuple[StageObserved, ...] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["index"]},
        description="Its stages, in pipeline order.",
    )


class FailureRecord(StatusBase):
    """Why a group failed: the one failure that no other explains."""

    time: Timestamp = Field(description="When the container ended.")
    group: int = Field(description="Group that failed.")
    incarnation: int = Field(description="Incarnation that failed.")
    stage: int | None = Field(default=None, description="Stage that failed first.")
    rank: int | None = Field(default=None, description="Rank that failed first, if the stage has several.")
    container: str = Field(default="", description="Container that failed first.")
    reason: str = Field(default="", description="Kubernetes' reason.")
    failure_class: FailureClass = Field(description="Failure class.")
    exit_code: int | None = Field(default=None, description="Exit code of the container.")
    message: str = Field(default="", description="Termination message of the container.")


class PipelineModelStatus(StatusBase):
    """What the operator has seen of the groups and wrote down about them."""

    observed_generation: int | None = Field(
        default=None, description=("Generation of the spec that this status is about.")
    )
    replicas: int = Field(default=0, description="Groups that exist.")
    ready_replicas: int = Field(default=0, description="Groups that answer requests.")
    updated_replicas: int = Field(default=0, description="Groups of the current revision.")
    update_revision: str = Field(
        default="", description=("Hash of the current template, the revision of the newest groups.")
    )
    selector: str = Field(default="", description="Label selector of stage 0 pods, one for each group.")
    url: str = Field(default="", description="Base URL at which a gateway serves the model; empty if none is known.")
    operator: str = Field(
        default="",
        description=(
            "Operator that owns this model, as namespace and name of its Lease. Other operators leave it alone."
        ),
    )
    retired_incarnation: int = Field(
        default=0, description="Highest incarnation of a removed group; later groups start above it."
    )
    restart_request: str = Field(default="", description="Last handled value of the annotation stageline.dev/restart.")
    progressed_at: Timestamp | None = Field(
        default=None,
        description="When a new revision began or a group last became ready; the progress deadline counts from here.",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        description="Available, Progressing, Degraded, Ready and Stalled.",
    )
    groups: tuple[GroupStatus, ...] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["index"]},
        description="Every group, with its restarts.",
    )
    last_failures: tuple[FailureRecord, ...] = Field(
        default=(), description="Latest failures, newest first; kept when pods are replaced."
    )
