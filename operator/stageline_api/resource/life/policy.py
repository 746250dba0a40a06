"""`spec.restart` and `spec.timeouts`: how often a group is restarted, and how long each phase may take."""

from typing import Final

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api.endpoints import DEFAULT_RESUME_WINDOW_SECONDS
from stageline_api.resource.base import SpecBase, cel, cel_extra
from stageline_api.runtime_config import Timeouts

LONGEST_BACKOFF_SECONDS: Final = 60
"""Maximum back-off; it doubles with each restart."""


def _default(field: str) -> int:
    return int(getattr(Timeouts(), field))


class RestartSpec(SpecBase):
    """How often a failed group is replaced."""

    max_restarts: int = Field(
        default=5,
        ge=0,
        le=1000,
        description=(
            "Restarts of one group within `windowSeconds`. After these the group stays down and the PipelineModel is "
            "Degraded with the cause. Default 5, between 0 (never restart) and 1000."
        ),
    )
    window_seconds: int = Field(
        default=600,
        ge=1,
        le=86_400,
        description="Window in seconds over which restarts are counted. Default 600, between 1 and 86400.",
    )
    backoff_seconds: int = Field(
        default=1,
        ge=1,
        le=LONGEST_BACKOFF_SECONDS,
        description=(
            "Seconds before the first restart. Doubles with each further restart in the window, up to 60. Default 1, "
            "between 1 and 60."
        ),
    )


class TimeoutsSpec(SpecBase):
    """How long each phase may take before it counts as failed."""

    scheduling_seconds: int = Field(
        default=300,
        ge=1,
        le=86_400,
        description=(
            "Seconds that a group may hold nodes for some of its stages while others have none. Then it releases them "
            "all and retries later; no restart is used. Default 300, between 1 and 86400."
        ),
    )
    rendezvous_seconds: int = Field(
        default=_default("rendezvous_seconds"),
        ge=1,
        le=86_400,
        description=(
            "Seconds that the engine and each stage wait for the rest of their group to connect, counted from their "
            "own start. Stages that have not started by then (image pull, volume, preparation) use no restart: their "
            "pods are kept, and the pods that timed out are recreated. Default 120, between 1 and 86400."
        ),
    )
    load_seconds: int = Field(
        default=_default("load_seconds"),
        ge=1,
        le=86_400,
        description=(
            "Seconds that a stage may take to load its layers. Includes the download for an `hf://` source in shards. "
            "Default 1800, between 1 and 86400."
        ),
    )
    step_seconds: int = Field(
        default=_default("step_seconds"),
        ge=1,
        le=3600,
        description=(
            "Seconds without a finished step, while work is queued, after which the group is replaced. Also the limit "
            "for one operation of one stage, waits for its neighbours included. A step crosses all stages, so this "
            "must exceed the slowest step of the whole pipeline; the first step gets it once for each stage. Time in "
            "which a stage is runnable but has no CPU does not count. Default 60, between 1 and 3600."
        ),
    )
    drain_seconds: int = Field(
        default=_default("drain_seconds"),
        ge=0,
        le=3600,
        description=(
            "Seconds that running answers have to finish once a group drains. Default 30, between 0 and 3600; at most "
            "`template.terminationGracePeriodSeconds`."
        ),
    )
    resume_window_seconds: int = Field(
        default=DEFAULT_RESUME_WINDOW_SECONDS,
        ge=0,
        le=3600,
        description=(
            "Seconds that the gateway keeps an answer after its group died, until a group of the same revision can "
            "continue it. Then the answer ends with an error. Changing it replaces no group. Default 60, between 0 "
            "(only resume immediately) and 3600."
        ),
    )

    def to_runtime(self) -> Timeouts:
        """The same limits in the runtime's own type."""
        return Timeouts(
            rendezvous_seconds=self.rendezvous_seconds,
            load_seconds=self.load_seconds,
            step_seconds=self.step_seconds,
            drain_seconds=self.drain_seconds,
        )


_STUCK_RULE: Final = "must be at least 1 when rollout.maxSurge is 0, or no group could ever be replaced"


class RolloutSpec(SpecBase):
    """How a change of the template reaches the groups. All numbers count whole groups."""

    max_surge: int = Field(
        default=1,
        ge=0,
        le=64,
        description=(
            "Groups that may exist above `replicas` during a rollout. Default 1: a new group is ready before an old "
            "one is drained, which needs capacity for both. Between 0 and 64."
        ),
    )
    max_unavailable: int = Field(
        default=0,
        ge=0,
        le=64,
        description=(
            "Groups that may be missing below `replicas` during a rollout. With `maxSurge: 0` and `maxUnavailable: 1` "
            "groups are replaced in place, one at a time. The last ready group is drained only after a new one is "
            "ready, unless it is the only one and `maxSurge` is 0. Default 0, between 0 and 64."
        ),
    )
    partition: int = Field(
        default=0,
        ge=0,
        le=64,
        description=(
            "Number of groups that keep their revision, to try a change on the others first. Default 0, between 0 and "
            "64."
        ),
    )
    progress_deadline_seconds: int = Field(
        default=1800,
        ge=1,
        le=86_400,
        description=(
            "Seconds without another ready group after which Progressing is False with the reason "
            "ProgressDeadlineExceeded. Nothing is rolled back. Default 1800, between 1 and 86400."
        ),
    )

    @model_validator(mode="after")
    def _can_move(self) -> "RolloutSpec":
        if self.max_surge == 0 and self.max_unavailable == 0:
            raise PydanticCustomError("at_field", "{rule}", {"at": ("maxUnavailable",), "rule": _STUCK_RULE})
        return self

    model_config = ConfigDict(
        json_schema_extra=cel_extra(
            cel("self.maxSurge > 0 || self.maxUnavailable > 0", _STUCK_RULE, ".maxUnavailable"),
        )
    )
