"""What the command line decides about an operator process, parsed once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stageline_api import ports
from stageline_operator.planner.types import ANY_PROMETHEUS

FIELD_MANAGER: Final = "stageline-operator"
"""The one field manager of everything applied, and the reporting controller of every Event."""


@dataclass(frozen=True)
class LeaseTimes:
    """Who may act when. A dead leader is replaced at most `duration + retry` after its last renewal.

    A leader stops acting `renew_deadline` after its last renewal began, and no write of its may be on the wire for
    longer than `longest_write`: `renew_deadline + longest_write < duration`, so a lease that can be taken has no
    holder that still acts.
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
    """Runtime class of stage pods that compute on GPUs, where their model names none."""
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
    lease_times: LeaseTimes = field(default_factory=LeaseTimes)
    metrics_host: str = "0.0.0.0"
    metrics_port: int = ports.OPERATOR_METRICS
    workers: int = 8
    """Models reconciled at the same time."""
    relist_seconds: float = 300.0
    """How often what was watched is compared with a full list."""
