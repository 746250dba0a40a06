"""The settings of an operator process, parsed once from the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stageline_api import ports
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_operator.planner.types import ANY_PROMETHEUS

FIELD_MANAGER: Final = "stageline-operator"
"""The only field manager of applied objects, and the reporting controller of every Event."""


WRITE_TIMEOUT_SECONDS: Final = 35.0
"""For writes by the lease holder. The API server limits a request to 34 s; an admission webhook may take 30 of them."""


@dataclass(frozen=True)
class LeaseTimes:
    """Timing of the election. A dead leader is replaced at most `duration + retry` after its last renewal.

    A leader stops acting `renew_deadline` after its last renewal began, and abandons a write in flight within
    `longest_write`. Since `renew_deadline + longest_write < duration`, an expired lease has no holder that still acts.
    While the lease is held, a write may take longer.
    """

    duration_seconds: float = 10.0
    renew_deadline_seconds: float = 6.0
    retry_seconds: float = 2.0
    longest_write_seconds: float = 3.0

    def __post_init__(self) -> None:
        if self.renew_deadline_seconds + self.longest_write_seconds >= self.duration_seconds:
            raise ValueError(f"two leaders could act at once: {self}")


@dataclass(frozen=True)
class LeaseName:
    """The Lease that replicas compete for."""

    namespace: str
    name: str = "stageline-operator"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class OperatorSettings:
    """One operator process."""

    default_image: str
    """Image of stage pods without one in their template."""
    identity: str
    """Name of this process among its replicas; unique."""
    metrics_from: tuple[Mapping[str, Any], ...] = ANY_PROMETHEUS
    """Peers that may scrape stages and engines, as in a NetworkPolicy."""
    own_namespace: str | None = None
    """Namespace of this process's pod; None outside a cluster."""
    gateway_urls: Mapping[str, str] = field(default_factory=dict)
    """Base URL at which a gateway serves a namespace's models, by namespace."""
    tracing_env: Mapping[str, str] = field(default_factory=dict)
    """OTEL_* variables of engine containers."""
    gpu_runtime_class: str = ""
    """Runtime class of stage pods that use GPUs and name none."""
    vllm_image: str = ""
    """vLLM's own image for stages that vLLM runs, if their model names none."""
    vllm_files_image: str = ""
    """Image of the init container that adds Stageline to it."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty serves all."""
    kubeconfig: Path | None = None
    context: str | None = None
    lease: LeaseName | None = None
    """None: this is the only replica, and it acts without a lease."""

    @property
    def claim(self) -> str:
        """`status.operator` of the models that this installation acts on; empty without a Lease."""
        return "" if self.lease is None else str(self.lease)

    def is_anothers(self, status: PipelineModelStatus) -> bool:
        """Whether the model with this status belongs to another installation."""
        return self.claim != "" and status.operator not in ("", self.claim)

    lease_times: LeaseTimes = field(default_factory=LeaseTimes)
    metrics_host: str = "0.0.0.0"
    metrics_port: int = ports.OPERATOR_METRICS
    workers: int = 8
    """Models reconciled at the same time."""
    relist_seconds: float = 300.0
    """Interval of full lists, which correct what the watches missed."""
