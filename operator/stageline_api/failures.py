"""Exit codes, failure classes and the termination message: how a container reports why it ended.

A failing container writes one `TerminationMessage` as JSON to its termination path and exits with the code of its
class. The group's cause is the failure that no other explains: follow a lost peer to the peer that it names. A drained
container reports class `Evicted` and exits with 0, which distinguishes it from one that ended on its own.
"""

from enum import IntEnum, StrEnum

from pydantic import BaseModel, ConfigDict


class ExitCode(IntEnum):
    """Exit statuses of `stageline prepare|engine|stage|gateway`."""

    DRAINED = 0
    INTERNAL = 1
    BAD_CONFIG = 64
    MODEL_LOAD = 65
    OUT_OF_MEMORY = 66
    RENDEZVOUS_TIMEOUT = 70
    PEER_LOST = 71
    STEP_TIMEOUT = 72
    ENGINE_LOST = 73


class FailureClass(StrEnum):
    """Why a stage, an engine or a whole group ended."""

    BAD_CONFIG = "BadConfig"
    MODEL_LOAD = "ModelLoad"
    OUT_OF_MEMORY = "OutOfMemory"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    PEER_LOST = "PeerLost"
    STEP_TIMEOUT = "StepTimeout"
    ENGINE_LOST = "EngineLost"
    INTERNAL = "Internal"
    KILLED = "Killed"
    OOM_KILLED = "OOMKilled"
    IMAGE_PULL = "ImagePull"
    UNSCHEDULABLE = "Unschedulable"
    NOT_STARTED = "NotStarted"
    """The kubelet can't create its containers: a volume fails to mount, a Secret is missing, or the sandbox fails."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """The API server refuses one of its pods: a ResourceQuota of the namespace is used up."""
    POD_REFUSED = "PodRefused"
    """The API server refuses one of its pods for another reason: an admission policy, a webhook, a missing right."""
    NODE_LOST = "NodeLost"
    EVICTED = "Evicted"
    CRASH_LOOP = "CrashLoop"


EXIT_CODE_OF_CLASS: dict[FailureClass, ExitCode] = {
    FailureClass.BAD_CONFIG: ExitCode.BAD_CONFIG,
    FailureClass.MODEL_LOAD: ExitCode.MODEL_LOAD,
    FailureClass.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    FailureClass.RENDEZVOUS_TIMEOUT: ExitCode.RENDEZVOUS_TIMEOUT,
    FailureClass.PEER_LOST: ExitCode.PEER_LOST,
    FailureClass.STEP_TIMEOUT: ExitCode.STEP_TIMEOUT,
    FailureClass.ENGINE_LOST: ExitCode.ENGINE_LOST,
    FailureClass.INTERNAL: ExitCode.INTERNAL,
}
CLASS_OF_EXIT_CODE: dict[int, FailureClass] = {int(code): kind for kind, code in EXIT_CODE_OF_CLASS.items()}

CONSEQUENCES: frozenset[FailureClass] = frozenset({FailureClass.PEER_LOST, FailureClass.ENGINE_LOST})
"""Classes that point at another container's failure, so they are never the cause if another class is known."""


class TerminationMessage(BaseModel):
    """The termination message of a container. `stage` is None for the engine; `peer` is a stage index.

    `rank` is the stage's rank that failed first; None if the stage is one process or the failure is not of a single
    rank.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    failure_class: FailureClass
    stage: int | None = None
    rank: int | None = None
    step: int | None = None
    operation: str = ""
    peer: int | None = None
    detail: str = ""


def place_of(stage: int | None, rank: int | None) -> str:
    """`stage 2, rank 1`: where something failed; without the rank if it is unknown."""
    if stage is None:
        return "engine"
    return f"stage {stage}" if rank is None else f"stage {stage}, rank {rank}"
