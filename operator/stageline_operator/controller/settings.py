"""What the command line decides about an operator process, parsed once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stageline_api import ports
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_operator.planner.types import ANY_PROMETHEUS

FIELD_MANAGER: Final = "stageline-operator"
"""The one field manager of everything applied, and the reporting controller of every Event."""


WRITE_TIMEOUT_SECONDS: Final = 35.0
"""For writes by the lease's holder. The API server gives a request 34 s, of which an admission webhook may take 30."""


@dataclass(frozen=True)
class LeaseTimes:
    """Who may act when. A dead leader is replaced at most `duration + retry` after its last renewal.

    A leader stops acting `renew_deadline` after its last renewal began, and a write that is on the wire then is
    abandoned within `longest_write`: `renew_deadline + longest_write < duration`, so a lease that can be taken has no
    holder that still acts. While the lease is held a write may take longer.
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
    """Which Lease replicas compete for."""

    namespace: str
    name: str = "stageline-operator"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class OperatorSettings:
    """One operator process."""

    default_image: str
    """Image of stage pods whose template names none."""
    identity: str
    """Name of this process among its replicas; unique."""
    metrics_from: tuple[Mapping[str, Any], ...] = ANY_PROMETHEUS
    """Who may scrape stages and engines, as peers of a NetworkPolicy."""
    own_namespace: str | None = None
    """Where this process' pod is; None outside a cluster."""
    gateway_urls: Mapping[str, str] = field(default_factory=dict)
    """By namespace: base URL at which a gateway serves its models."""
    tracing_env: Mapping[str, str] = field(default_factory=dict)
    """OTEL_* variables of engine containers."""
    gpu_runtime_class: str = ""
    """Runtime class of stage pods that use GPUs, if their model names none."""
    vllm_image: str = ""
    """Image of stages that vLLM runs, where their model names none: vLLM's own."""
    vllm_files_image: str = ""
    """Image of the init container that brings Stageline to it."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty serves all."""
    kubeconfig: Path | None = None
    context: str | None = None
    lease: LeaseName | None = None
    """None: this is the only replica, and it acts without asking."""

    @property
    def claim(self) -> str:
        """`status.operator` of the models that this installation acts on; empty for one without a Lease."""
        return "" if self.lease is None else str(self.lease)

    def is_anothers(self, status: PipelineModelStatus) -> bool:
        """Whether the model with this status is another installation's."""
        return self.claim != "" and status.operator not in ("", self.claim)

    lease_times: LeaseTimes = field(default_factory=LeaseTimes)
    metrics_host: str = "0.0.0.0"
    metrics_port: int = ports.OPERATOR_METRICS
    workers: int = 8
    """Models reconciled at the same time."""
    relist_seconds: float = 300.0
    """How often what was watched is compared with a full list."""
