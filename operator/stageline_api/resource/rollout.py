"""`spec.rollout`: how groups of an old revision are replaced by groups of the new one."""

from typing import Final

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api.resource.base import SpecBase, cel, cel_extra

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
