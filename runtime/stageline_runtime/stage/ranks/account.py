"""What each rank tells its supervisor about itself, and the one status that a stage's ranks make together. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict

from stageline_api.health import Phase, StageStatus
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.stage.telemetry.state_clock import BusyKind

_ORDER: Final = (
    Phase.FAILED,
    Phase.DRAINING,
    Phase.STARTING,
    Phase.CONNECTING,
    Phase.LOADING,
    Phase.RENDEZVOUS,
    Phase.WARMING,
    Phase.READY,
)
"""The stage is where the first of these is that one of its ranks is in."""


class RankAccount(BaseModel):
    """One rank's account of itself, served on its own socket at `/account`."""

    model_config = ConfigDict(frozen=True)

    status: StageStatus
    busy_seconds: float
    exchange_seconds: float | None
    """Of the busy time: in exchanges with the other ranks. None until it has met them."""

    @classmethod
    def of(cls, progress: StageProgress) -> "RankAccount":
        spent, _ = progress.clock.reading()
        return cls(
            status=progress.status(),
            busy_seconds=sum(spent.get(kind, 0.0) for kind in BusyKind),
            exchange_seconds=None if progress.exchanges is None else progress.exchanges.seconds,
        )


def phase_of_ranks(accounts: Sequence[RankAccount | None]) -> Phase:
    """Of all ranks; one that has said nothing yet (None) is starting."""
    phases = [Phase.STARTING if account is None else account.status.phase for account in accounts]
    return min(phases, key=_ORDER.index)


def status_of_ranks(accounts: Sequence[RankAccount | None], nobody: StageStatus) -> StageStatus:
    """The stage's status: bytes of all ranks together, steps of the first. `nobody` is used before any rank has
    answered."""
    known = [account.status for account in accounts if account is not None]
    if not known:
        return nobody
    phase = phase_of_ranks(accounts)
    return known[0].model_copy(
        update={
            "phase": phase,
            "loaded_bytes": sum(status.loaded_bytes for status in known),
            "total_bytes": sum(status.total_bytes for status in known),
            "memory_bytes": sum(status.memory_bytes for status in known),
            "message": _message_at(phase, {rank: each.status for rank, each in enumerate(accounts) if each}),
        }
    )


def _message_at(phase: Phase, statuses: Mapping[int, StageStatus]) -> str:
    """What the first rank in that phase has to say; with its number, where not all are there."""
    rank, said = next(((rank, one.message) for rank, one in statuses.items() if one.phase is phase), (0, ""))
    return said if all(one.phase is phase for one in statuses.values()) else f"rank {rank}: {said}".removesuffix(": ")
