"""`spec.network`, `spec.restart` and `spec.timeouts`: how stages meet, how long they may take, how often they retry."""

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from stageline_api.runtime_config import Timeouts
from stageline_api.spec_base import SpecBase, check_pattern

INTERFACE_PATTERN: Final = r"^[A-Za-z0-9_.-]{1,15}$"
LONGEST_BACKOFF_SECONDS: Final = 60
"""Back-off doubles with each restart up to this."""


def _interface(name: str) -> str:
    return check_pattern(name, INTERFACE_PATTERN, "must be the name of a network interface, at most 15 characters")


def _default(field: str) -> int:
    return int(getattr(Timeouts(), field))


class NetworkSpec(SpecBase):
    """The network between stages."""

    interface: Annotated[str | None, AfterValidator(_interface)] = Field(
        default=None,
        max_length=15,
        json_schema_extra={"pattern": INTERFACE_PATTERN},
        description="Network interface that activations take, such as `eth1`. Default: the one with the pod's address.",
    )


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
        description="How long a stage may take to load its layers, in seconds. Default 1800, between 1 and 86400.",
    )
    step_seconds: int = Field(
        default=_default("step_seconds"),
        ge=1,
        le=3600,
        description=(
            "How long the pipeline may go without finishing a step while work is queued, in seconds, before the group "
            "is replaced; it must exceed the slowest step. Default 60, between 1 and 3600."
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

    def to_runtime(self) -> Timeouts:
        """The same limits in the runtime's own type."""
        return Timeouts(
            rendezvous_seconds=self.rendezvous_seconds,
            load_seconds=self.load_seconds,
            step_seconds=self.step_seconds,
            drain_seconds=self.drain_seconds,
        )
