"""`spec.autoscaling`: bounds and thresholds for the number of groups."""

from typing import Final

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api.resource.base import SpecBase, cel, cel_extra

MOST_REPLICAS: Final = 64
_ORDER_RULE: Final = "must be at least minReplicas"


class AutoscalingSpec(SpecBase):
    """Adds groups if requests wait, and removes groups if fewer are enough."""

    min_replicas: int = Field(
        default=1,
        ge=1,
        le=MOST_REPLICAS,
        description="Minimum number of groups. Default 1, between 1 and 64.",
    )
    max_replicas: int = Field(
        ge=1,
        le=MOST_REPLICAS,
        description="Maximum number of groups. Required, between 1 and 64 and at least `minReplicas`.",
    )
    queue_seconds: int = Field(
        default=5,
        ge=1,
        le=3600,
        description=(
            "Scale out when a request has waited this many seconds in an engine's queue. Default 5, between 1 and 3600."
        ),
    )
    target_load_percent: int = Field(
        default=70,
        ge=10,
        le=100,
        description=(
            "Scale in when the remaining groups would have at most this percentage of their slots "
            "(`engine.maxNumSeqs`) in use. Default 70, between 10 and 100."
        ),
    )
    scale_in_seconds: int = Field(
        default=300,
        ge=1,
        le=86_400,
        description=(
            "Seconds for which fewer groups must have been enough before groups are drained. Default 300, between 1 "
            "and 86400."
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
