"""`spec.restart` and `spec.timeouts`: how often a group is tried again, and how long each phase may take."""

from typing import Final

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api.endpoints import DEFAULT_RESUME_WINDOW_SECONDS
from stageline_api.resource.base import SpecBase, cel, cel_extra
from stageline_api.runtime_config import Timeouts

LONGEST_BACKOFF_SECONDS: Final = 60
"""Back-off doubles with each restart up to this."""


def _default(field: str) -> int:
    return int(getattr(Timeouts(), field))


class RestartSpec(SpecBase):
    """How often a failed group is replaced."""

    max_restarts: int = Field(
        default=5,
        ge=0,
        le=1000,
        description=(
            "Restarts of one group within `windowSeconds` after which it is left down and the PipelineModel shows "
            "Degraded with the cause. Default 5, between 0 (never restart) and 1000."
        ),
    )
    window_seconds: int = Field(
        default=600,
        ge=1,
        le=86_400,
        description="Length of the window that restarts are counted in, in seconds. Default 600, between 1 and 86400.",
    )
    backoff_seconds: int = Field(
        default=1,
        ge=1,
        le=LONGEST_BACKOFF_SECONDS,
        description=(
            "Wait before the first restart, in seconds; it doubles with each further restart in the window, up to 60. "
            "Default 1, between 1 and 60."
        ),
    )


class TimeoutsSpec(SpecBase):
    """How long each phase may take before it counts as failed."""

    scheduling_seconds: int = Field(
        default=300,
        ge=1,
        le=86_400,
        description=(
            "How long a group may hold nodes for some of its stages while others find none, in seconds; then it gives "
            "them all back and tries again later, without using up restarts. Default 300, between 1 and 86400."
        ),
    )
    rendezvous_seconds: int = Field(
        default=_default("rendezvous_seconds"),
        ge=1,
        le=86_400,
        description=(
            "How long the stages of a group may take to find each other once their pods run, in seconds; it must cover "
            "the slowest image pull. Default 120, between 1 and 86400."
        ),
    )
    load_seconds: int = Field(
        default=_default("load_seconds"),
        ge=1,
        le=86_400,
        description=(
            "How long a stage may take to load its layers, in seconds; with an `hf://` source in shards this includes "
            "downloading them. Default 1800, between 1 and 86400."
        ),
    )
    step_seconds: int = Field(
        default=_default("step_seconds"),
        ge=1,
        le=3600,
        description=(
            "How long the pipeline may go without finishing a step while work is queued, and how long one stage may "
            "take for one operation of a step, waits for its neighbours included, in seconds, before the group is "
            "replaced. A step crosses all stages one after the other, so this must exceed the slowest step through "
            "all of them, not through one; the first step gets it once for each stage. Default 60, between 1 and 3600."
        ),
    )
    drain_seconds: int = Field(
        default=_default("drain_seconds"),
        ge=0,
        le=3600,
        description=(
            "How long running answers may go on once a group is told to end, in seconds. Default 30, between 0 and "
            "3600; at most `template.terminationGracePeriodSeconds`."
        ),
    )
    resume_window_seconds: int = Field(
        default=DEFAULT_RESUME_WINDOW_SECONDS,
        ge=0,
        le=3600,
        description=(
            "How long the gateway keeps an answer whose group died, until another group of its revision, or the same "
            "one when it is back, can continue it, in seconds; then the answer ends with an error. Groups are not "
            "replaced when it changes. Default 60, between 0 (an answer is continued only where that is possible at "
            "once) and 3600."
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
    """How a change of the template reaches the groups. All numbers are whole groups."""

    max_surge: int = Field(
        default=1,
        ge=0,
        le=64,
        description=(
            "Groups that may exist above `replicas` while a change rolls out. Default 1: a new group is ready before "
            "an old one is drained, which needs room for it. Between 0 and 64."
        ),
    )
    max_unavailable: int = Field(
        default=0,
        ge=0,
        le=64,
        description=(
            "Groups that may be missing below `replicas` while a change rolls out. Default 0. With `maxSurge: 0` and "
            "`maxUnavailable: 1` groups are replaced in their own place, one at a time. The last ready group is not "
            "drained before a new one is ready, unless it is the only one and `maxSurge` is 0. Between 0 and 64."
        ),
    )
    partition: int = Field(
        default=0,
        ge=0,
        le=64,
        description=(
            "Groups that keep the revision they have, as a trial of a change on the others. Default 0, between 0 and "
            "64."
        ),
    )
    progress_deadline_seconds: int = Field(
        default=1800,
        ge=1,
        le=86_400,
        description=(
            "How long no further group may become ready before the Progressing condition turns False with the reason "
            "ProgressDeadlineExceeded, in seconds; nothing is undone. Default 1800, between 1 and 86400."
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
