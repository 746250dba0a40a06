"""The node's records of containers, and the pod status in Kubernetes form derived from them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, assert_never


@dataclass(frozen=True)
class Waiting:
    """Not started: `reason` is the kubelet's (`PodInitializing`, `ErrImagePull`, `CreateContainerConfigError`)."""

    reason: str
    message: str = ""


@dataclass(frozen=True)
class Running:
    started_at: datetime
    pid: int


@dataclass(frozen=True)
class Terminated:
    """The process ended. `exit_code` is 128 + signal after a signal; `message` is its termination message."""

    exit_code: int
    signal: int
    reason: str
    message: str
    started_at: datetime
    finished_at: datetime


ContainerState = Waiting | Running | Terminated


@dataclass(frozen=True)
class ContainerRecord:
    name: str
    image: str
    state: ContainerState
    started: bool = False
    ready: bool = False
    restarts: int = 0
    last_end: Terminated | None = None

    def restarting(self, ended: Terminated, message: str) -> "ContainerRecord":
        """The record of a container that ended and will be restarted."""
        state = Waiting("CrashLoopBackOff", message)
        return ContainerRecord(self.name, self.image, state, restarts=self.restarts + 1, last_end=ended)

    def with_state(self, state: ContainerState) -> "ContainerRecord":
        runs = isinstance(state, Running)
        return replace(self, state=state, started=self.started and runs, ready=self.ready and runs)


@dataclass(frozen=True)
class Admission:
    """Whether the node accepted the pod; `message` is the reason if not."""

    admitted: bool
    message: str = ""


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC, with microseconds to keep the order of two ends within a second."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def pod_status(
    admission: Admission,
    init: Sequence[ContainerRecord],
    main: Sequence[ContainerRecord],
    pod_ip: str,
    started_at: datetime,
) -> dict[str, Any]:
    """`status` of a pod. A container that will be restarted is never in state Terminated."""
    initialized = all(_succeeded(record) for record in init)
    ready = initialized and all(record.ready for record in main)
    return {
        "phase": _phase(init, main),
        "podIP": pod_ip,
        "podIPs": [{"ip": pod_ip}],
        "hostIP": pod_ip,
        "startTime": timestamp(started_at),
        "conditions": [
            _condition("PodScheduled", admission.admitted, "Unschedulable", admission.message),
            _condition("Initialized", initialized, "ContainersNotInitialized"),
            _condition("ContainersReady", ready, "ContainersNotReady"),
            _condition("Ready", ready, "ContainersNotReady"),
        ],
        "initContainerStatuses": [_container_status(record, _succeeded(record)) for record in init],
        "containerStatuses": [_container_status(record, record.ready) for record in main],
    }


def _succeeded(record: ContainerRecord) -> bool:
    return isinstance(record.state, Terminated) and record.state.exit_code == 0


def _phase(init: Sequence[ContainerRecord], main: Sequence[ContainerRecord]) -> str:
    if any(isinstance(record.state, Terminated) and record.state.exit_code != 0 for record in init):
        return "Failed"
    if any(isinstance(record.state, Waiting) and record.restarts == 0 for record in (*init, *main)):
        return "Pending"
    if any(isinstance(record.state, (Running, Waiting)) for record in main):
        return "Running"
    return "Succeeded" if all(_succeeded(record) for record in main) else "Failed"


def _condition(kind: str, holds: bool, reason: str, message: str = "") -> dict[str, Any]:
    if holds:
        return {"type": kind, "status": "True"}
    return {"type": kind, "status": "False", "reason": reason, "message": message}


def _container_status(record: ContainerRecord, ready: bool) -> dict[str, Any]:
    return {
        "name": record.name,
        "image": record.image,
        "imageID": "",
        "restartCount": record.restarts,
        "ready": ready,
        "started": record.started,
        "state": _state(record.state),
        "lastState": {} if record.last_end is None else _state(record.last_end),
    }


def _state(state: ContainerState) -> Mapping[str, Any]:
    match state:
        case Waiting():
            return {"waiting": {"reason": state.reason, "message": state.message}}
        case Running():
            return {"running": {"startedAt": timestamp(state.started_at)}}
        case Terminated():
            return {
                "terminated": {
                    "exitCode": state.exit_code,
                    "signal": state.signal,
                    "reason": state.reason,
                    "message": state.message,
                    "startedAt": timestamp(state.started_at),
                    "finishedAt": timestamp(state.finished_at),
                }
            }
        case _:
            assert_never(state)
