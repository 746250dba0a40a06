"""How far each stage's clock is from the engine's, from exchanges over the plan bus. Pure: time is an argument.

The arithmetic is NTP's (RFC 5905, section 8): with the engine's clock at sending T1 and at receiving T4, the stage's at
receiving T2 and at sending T3, offset = ((T2 - T1) + (T3 - T4)) / 2 and round trip = (T4 - T1) - (T3 - T2). The offset
is wrong by at most half the round trip, whatever the two directions took. A stage answers between two plans, so most
exchanges of a busy stage are slow ones: of the last exchanges the one with the smallest bound counts (section 10 calls
it the clock filter), its bound growing with age by what two clocks may drift apart.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from stageline_api.telemetry.timeline import GroupClocks, StageClock
from stageline_runtime.plan_bus.messages import Pong

KEPT_EXCHANGES: Final = 64
DRIFT_PARTS_PER_MILLION: Final = 30
"""Two clocks, each off by at most 15 ppm (RFC 5905 calls it PHI)."""
PING_NANOSECONDS: Final = 1_000_000_000
LOST_NANOSECONDS: Final = 10_000_000_000
"""A stage that has not answered for so long is asked again."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One answered ping."""

    offset_nanoseconds: int
    round_trip_nanoseconds: int
    asked_nanoseconds: int
    """The engine's clock when it asked."""

    def error_at(self, now_nanoseconds: int) -> int:
        """Bound on the error of the offset at `now_nanoseconds`."""
        age = max(0, now_nanoseconds - self.asked_nanoseconds)
        return self.round_trip_nanoseconds // 2 + age * DRIFT_PARTS_PER_MILLION // 1_000_000


def exchange(pong: Pong, now_nanoseconds: int) -> Exchange:
    """What one answer says, come at `now_nanoseconds` of the engine's clock."""
    sent, received = pong.ping_nanoseconds, pong.received_nanoseconds
    offset = ((received - sent) + (pong.sent_nanoseconds - now_nanoseconds)) // 2
    round_trip = (now_nanoseconds - sent) - (pong.sent_nanoseconds - received)
    return Exchange(offset, max(0, round_trip), sent)


class StageClocks:
    """The comparisons with all stages of a group."""

    def __init__(self) -> None:
        self._exchanges: dict[int, deque[Exchange]] = {}
        self._asked: dict[int, int] = {}

    def due(self, stage: int, now_nanoseconds: int) -> bool:
        """Whether `stage` is to be asked now; if so, it counts as asked. One question is out at a time."""
        asked = self._asked.get(stage)
        if asked is not None and now_nanoseconds - asked < LOST_NANOSECONDS:
            return False
        kept = self._exchanges.get(stage)
        if asked is None and kept and now_nanoseconds - kept[-1].asked_nanoseconds < PING_NANOSECONDS:
            return False
        self._asked[stage] = now_nanoseconds
        return True

    def answered(self, stage: int, pong: Pong, now_nanoseconds: int) -> None:
        """A stage's answer came."""
        self._asked.pop(stage, None)
        kept = self._exchanges.setdefault(stage, deque(maxlen=KEPT_EXCHANGES))
        kept.append(exchange(pong, now_nanoseconds))

    def best(self, stage: int, now_nanoseconds: int) -> Exchange | None:
        """The exchange with the smallest error bound now; None before the first."""
        return min(self._exchanges.get(stage, ()), key=lambda one: one.error_at(now_nanoseconds), default=None)

    def report(self, now_nanoseconds: int) -> GroupClocks:
        """All stages compared so far, in order."""
        best = {stage: self.best(stage, now_nanoseconds) for stage in sorted(self._exchanges)}
        return GroupClocks(
            stages=tuple(
                StageClock(
                    stage=stage,
                    offset_nanoseconds=one.offset_nanoseconds,
                    round_trip_nanoseconds=one.round_trip_nanoseconds,
                    error_nanoseconds=one.error_at(now_nanoseconds),
                )
                for stage, one in best.items()
                if one is not None
            )
        )
