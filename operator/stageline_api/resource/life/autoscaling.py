"""`spec.autoscaling`: between which numbers of groups the operator chooses, and by what."""

from typing import Final

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api.resource.base import SpecBase, cel, cel_extra

MOST_REPLICAS: Final = 64
_ORDER_RULE: Final = "must be at least minReplicas"


class AutoscalingSpec(SpecBase):
    """Groups are added when requests wait, and taken away when fewer would do."""

    min_replicas: int = Field(
        default=1,
        ge=1,
        le=MOST_REPLICAS,
        description="Fewest groups. Default 1, between 1 and 64.",
    )
    max_replicas: int = Field(
        ge=1,
        le=MOST_REPLICAS,
        description="Most groups. Required, between 1 and 64 and at least `minReplicas`.",
    )
    queue_seconds: int = Field(
        default=5,
        ge=1,
        le=3600,
        description=(
            "Groups are added when a request has waited so long in an engine's queue for its first step, in seconds. "
            "Default 5, between 1 and 3600."
        ),
    )
    target_load_percent: int = Field(
        default=70,
        ge=10,
        le=100,
        description=(
            "Groups are taken away when the requests of all groups would fill at most so much of the slots "
            "(`engine.maxNumSeqs`) of those that stay, in percent. Default 70, between 10 and 100."
        ),
    )
    scale_in_seconds: int = Field(
        default=300,
        ge=1,
        le=86_400,
        description=(
            "For how long fewer groups must have been enough, in seconds, before the others are drained. Default 300, "
            "between 1 and 86400."
        ),
    )

    @model_validator(mode="after")
    def _in_order(self) -> "AutoscalingSpec":
        if self.max_replicas < self.min_replicas:
            rule = f"{_ORDER_RULE}, which is {self.min_replicas}"
            raise PydanticCustomError("at_field", "{rule}", {"at": ("maxReplicas",), "rule": rule})
        return self

    model_config = ConfigDict(
        json_schema_extra=cel_extra(cel("self.maxReplicas >= self.minReplicas", _ORDER_RULE, ".maxReplicas"))
    )
