"""How often and how soon a failed group is replaced. Pure arithmetic over the times of past restarts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from stageline_api.resource.policy import LONGEST_BACKOFF_SECONDS, RestartSpec


@dataclass(frozen=True)
class RestartDecision:
    """`at` is when the next incarnation may start; None when the budget is spent."""

    recent: tuple[datetime, ...]
    at: datetime | None


def recent_restarts(restarts: Sequence[datetime], policy: RestartSpec, now: datetime) -> tuple[datetime, ...]:
    """Restarts that still count against the budget."""
    window = timedelta(seconds=policy.window_seconds)
    return tuple(moment for moment in restarts if now - moment < window)


def decide_restart(restarts: Sequence[datetime], policy: RestartSpec, now: datetime) -> RestartDecision:
    """After r restarts in the window: none left when r reaches `max_restarts`, else wait min(60, backoff * 2^r) s."""
    recent = recent_restarts(restarts, policy, now)
    if len(recent) >= policy.max_restarts:
        return RestartDecision(recent, None)
    doublings = min(len(recent), LONGEST_BACKOFF_SECONDS.bit_length())
    seconds = min(LONGEST_BACKOFF_SECONDS, policy.backoff_seconds * 2**doublings)
    return RestartDecision(recent, now + timedelta(seconds=seconds))
