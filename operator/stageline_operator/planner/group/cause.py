"""Finds the root cause among a group's failures: the one that no other failure explains.

`PeerLost` names its peer, and a lost engine runs in stage 0's pod. Both are followed to the end that they point at,
which may become visible a moment later. So if a group shows only consequences, the planner waits `SETTLE_SECONDS`
before it accepts one as the cause. Among several independent failures the earliest is the cause.

A stage that waited too long names its peer too. If one stage hangs, every stage times out: each waits for the stage
before it, and stage 0 waits for the last stage's tokens. A stage that waited for a peer that has not ended is the
witness: that peer hangs. Otherwise the waits are followed to a stage that waited for no peer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from signal import Signals
from typing import Final

from pydantic import ValidationError

from stageline_api.failures import CLASS_OF_EXIT_CODE, CONSEQUENCES, FailureClass, TerminationMessage, place_of
from stageline_operator.planner.observed.container_end import ContainerEnd

SETTLE_SECONDS: Final = 5.0
"""Kubelets record ends in whole seconds, and a busy kubelet reports an end some seconds late."""
_ENGINE: Final = "engine"
_LONGEST_DETAIL: Final = 1000
_CLASS_OF_POD_REASON: Final = {
    "Evicted": FailureClass.EVICTED,
    "Preempting": FailureClass.EVICTED,
    "Terminated": FailureClass.EVICTED,
    "NodeShutdown": FailureClass.EVICTED,
    "NodeLost": FailureClass.NODE_LOST,
}
"""Reasons for which a running pod was ended as a whole."""
_RENDEZVOUS_OPERATIONS: Final = frozenset({"", "connect", "handshake", "rendezvous"})
"""Operations in which a container waits for other pods. An end that names no operation may be one of them."""


@dataclass(frozen=True)
class Failure:
    """One container's end, classified. `peer` is the stage that it points at, `rank` its rank that failed first."""

    end: ContainerEnd
    failure_class: FailureClass
    peer: int | None
    detail: str
    rank: int | None = None
    is_silent: bool = False
    """Whether the stage has not ended: other stages timed out while they waited for it."""
    operation: str = ""
    """The operation that failed, from the termination message."""

    @property
    def is_consequence(self) -> bool:
        """Whether it points at another failure, or exited with status 0, and so explains nothing."""
        return self.failure_class in CONSEQUENCES or self.end.exit_code == 0

    @property
    def is_waiting_in_vain(self) -> bool:
        """Whether it only reports that its peers did not arrive. A peer that failed or has not begun explains it."""
        return self.failure_class is FailureClass.RENDEZVOUS_TIMEOUT and self.operation in _RENDEZVOUS_OPERATIONS

    @property
    def is_explained_by_others(self) -> bool:
        """Whether another stage that can't start, or has not begun, may be the cause."""
        return self.is_consequence or self.is_waiting_in_vain


@dataclass(frozen=True)
class Settling:
    """Only consequences are visible so far: look again after `seconds`."""

    seconds: float


def find_cause(ends: Sequence[ContainerEnd], now: datetime) -> Failure | Settling | None:
    """The cause among the ends of one incarnation; None if nothing has failed."""
    failures = sorted((classify(end) for end in ends), key=lambda failure: failure.end.finished_at)
    if not failures:
        return None
    candidate = _follow_waits(_follow(failures), failures)
    if candidate.is_waiting_in_vain:
        others = (each for each in failures if not each.is_explained_by_others)
        candidate = next(others, candidate)
    if not candidate.is_consequence and not candidate.is_silent:
        return candidate
    # Another machine's clock may be ahead: never wait longer than the settling time.
    waited = max(0.0, (now - failures[0].end.finished_at).total_seconds())
    if waited < SETTLE_SECONDS:
        return Settling(SETTLE_SECONDS - waited)
    return candidate


def _follow(failures: Sequence[Failure]) -> Failure:
    """Follow the earliest failure, through the peers it points at, to the end of its chain."""
    drained = next((failure for failure in failures if failure.failure_class is FailureClass.EVICTED), failures[0])
    current = next((failure for failure in failures if failure.end.exit_code != 0), drained)
    seen: list[Failure] = []
    while current.is_consequence and current not in seen:
        seen.append(current)
        pointed_to = _pointed_at(current, failures)
        if pointed_to is None:
            break
        current = pointed_to
    if not current.is_consequence:
        return current
    return next((failure for failure in failures if not failure.is_consequence), current)


def _follow_waits(found: Failure, failures: Sequence[Failure]) -> Failure:
    """Follow a stage that waited too long to the end of the chain of waits."""
    if found.failure_class is not FailureClass.STEP_TIMEOUT:
        return found
    waits = [each for each in failures if each.failure_class is FailureClass.STEP_TIMEOUT and each.peer is not None]
    if (witness := _witness_of_silence(waits, failures)) is not None:
        return _silent(witness)
    current = found if found.peer is not None else next(iter(waits), found)
    seen: list[int] = []
    while current.failure_class is FailureClass.STEP_TIMEOUT and current.peer is not None:
        if current.end.stage in seen:
            return found  # the stages wait for each other in a circle
        seen.append(current.end.stage)
        ends = [each for each in failures if each.end.stage == current.peer and each.end.container != _ENGINE]
        ended = [each for each in ends if each.end.exit_code != 0 and each.failure_class not in CONSEQUENCES]
        if not ended:
            return _silent(current)
        current = ended[0]
    return current


def _witness_of_silence(waits: Sequence[Failure], failures: Sequence[Failure]) -> Failure | None:
    """The stage that waited for a peer that has not ended, while others have: the peer hangs and caused their ends.

    Stage 0 waits for the last stage's tokens, which are late whichever stage hangs. So a wait for the preceding stage
    is the better witness.
    """
    ended = {each.end.stage for each in failures if each.end.container != _ENGINE}
    met = [each for each in waits if each.peer not in ended]
    return min(met, key=lambda each: (each.peer != each.end.stage - 1, each.end.stage), default=None)


def _silent(witness: Failure) -> Failure:
    """The failure of the stage that the witness waited for, with the details that the witness reported."""
    assert witness.peer is not None, witness
    end = replace(witness.end, stage=witness.peer, exit_code=None, reason=str(FailureClass.STEP_TIMEOUT))
    waited = place_of(witness.end.stage, witness.rank)
    detail = f"it hangs: {waited} timed out waiting for it: {witness.detail}"
    return Failure(end, FailureClass.STEP_TIMEOUT, None, detail, is_silent=True)


def _pointed_at(failure: Failure, failures: Sequence[Failure]) -> Failure | None:
    """The failure that a consequence points at; among several, prefer one that is no consequence."""
    if failure.failure_class is FailureClass.ENGINE_LOST:
        pointed_at = [each for each in failures if each.end.container == _ENGINE]
    else:
        pointed_at = [each for each in failures if each.end.stage == failure.peer and each.end.container != _ENGINE]
    pointed_at = [each for each in pointed_at if each != failure and each.end.exit_code != 0]
    return min(pointed_at, key=lambda each: each.is_consequence, default=None)


def classify(end: ContainerEnd) -> Failure:
    """Class and detail of one end: from its termination message, else its exit code, else the kubelet's reason."""
    if end.reason == "OOMKilled":
        return Failure(end, FailureClass.OOM_KILLED, None, "killed by the kernel: out of memory")
    message = _termination_message(end.message)
    if message is not None:
        rank, operation = message.rank, message.operation
        return Failure(end, message.failure_class, message.peer, message.detail, rank, operation=operation)
    failure_class, detail = _seen_from_outside(end)
    last_line = _last_line(end.message)
    if failure_class is FailureClass.KILLED and last_line:
        return Failure(end, failure_class, None, f"{detail}; last output: {last_line}")
    return Failure(end, failure_class, None, last_line or detail)


def _termination_message(text: str) -> TerminationMessage | None:
    try:
        return TerminationMessage.model_validate_json(text)
    except ValidationError:
        return None


def _last_line(text: str) -> str:
    """The last non-empty line: if only a log remains, its end is there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_DETAIL] if lines else ""


def _seen_from_outside(end: ContainerEnd) -> tuple[FailureClass, str]:
    if end.reason in _CLASS_OF_POD_REASON:
        return _CLASS_OF_POD_REASON[end.reason], end.reason
    if end.exit_code is None:
        return (FailureClass.IMAGE_PULL if "Image" in end.reason else FailureClass.INTERNAL), end.reason
    if end.signal or end.exit_code > 128:
        return FailureClass.KILLED, f"killed by {signal_name(end.signal or end.exit_code - 128)}"
    if end.exit_code == 0:
        return FailureClass.INTERNAL, "exited with status 0 and reported no drain"
    failure_class = CLASS_OF_EXIT_CODE.get(end.exit_code, FailureClass.INTERNAL)
    return failure_class, f"exited with status {end.exit_code} and no termination message"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; the number if the system has no name for it."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
