"""The engine's probes of running stages: their clocks and newest plans, and the figures derived from the answers.

One probe per stage is in flight at a time, about one a second; a stage answers between two plans, so its runner's
thread pays nothing for it. `StageClocks` and `LinkLatency` are pure: time is an argument.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from stageline_api.telemetry.timeline import GroupClocks, StageClock
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.plan_bus.messages import Ping, PlanMoments, Pong

KEPT_EXCHANGES: Final = 64
DRIFT_PARTS_PER_MILLION: Final = 30
"""Two clocks, each off by at most 15 ppm (RFC 5905 calls it PHI)."""
PING_NANOSECONDS: Final = 1_000_000_000
LOST_NANOSECONDS: Final = 10_000_000_000
"""A stage that has not answered for this long is probed again."""


class StageProbe:
    """Clocks and link latencies of one group. Used on the engine's event loop."""

    def __init__(
        self, stage_count: int, metrics: EngineMetrics, now_nanoseconds: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._metrics = metrics
        self._now = now_nanoseconds
        self._clocks = StageClocks()
        self._links = LinkLatency(stage_count)

    def ask(self, stages: Iterable[int], send: Callable[[int, Ping], None]) -> None:
        for stage in stages:
            if self._clocks.due(stage, self._now()):
                send(stage, Ping(self._now()))

    def answered(self, stage: int, pong: Pong) -> None:
        now = self._now()
        self._clocks.answered(stage, pong, now)

        latencies = self._links.observed(stage, pong.moments, self.offset)
        for receiver, seconds in latencies.transfers:
            self._metrics.p2p_latency(receiver).observe(seconds)
        for seconds in latencies.feedback:
            self._metrics.feedback_latency.observe(seconds)

    def offset(self, stage: int) -> int | None:
        """A stage's clock minus this one's, in nanoseconds; None before the first comparison."""
        best = self._clocks.best(stage, self._now())
        return None if best is None else best.offset_nanoseconds

    def report(self) -> GroupClocks:
        return self._clocks.report(self._now())


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
    """The measurement from one answer, received at `now_nanoseconds` of the engine's clock."""
    sent, received = pong.ping_nanoseconds, pong.received_nanoseconds
    offset = ((received - sent) + (pong.sent_nanoseconds - now_nanoseconds)) // 2
    round_trip = (now_nanoseconds - sent) - (pong.sent_nanoseconds - received)
    return Exchange(offset, max(0, round_trip), sent)


class StageClocks:
    """The offset of each stage's clock from the engine's, from exchanges over the plan bus.

    The arithmetic is NTP's (RFC 5905, section 8). The engine's clock gives T1 at sending and T4 at receiving, the
    stage's T2 at receiving and T3 at sending. Offset = ((T2 - T1) + (T3 - T4)) / 2 and round trip = (T4 - T1) - (T3
    - T2). The offset's error is at most half the round trip, for any split between the two directions. A stage
    answers between two plans, so most exchanges of a busy stage are slow. So the recent exchange with the smallest
    error bound counts (section 10 calls it the clock filter); the bound grows with age by the possible drift
    between two clocks.
    """

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
        self._asked.pop(stage, None)
        kept = self._exchanges.setdefault(stage, deque(maxlen=KEPT_EXCHANGES))
        kept.append(exchange(pong, now_nanoseconds))

    def best(self, stage: int, now_nanoseconds: int) -> Exchange | None:
        """The exchange with the smallest error bound now; None before the first."""
        return min(self._exchanges.get(stage, ()), key=lambda one: one.error_at(now_nanoseconds), default=None)

    def report(self, now_nanoseconds: int) -> GroupClocks:
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


@dataclass(frozen=True, slots=True)
class Latencies:
    """What the plans that were newly matched took."""

    transfers: tuple[tuple[int, float], ...]
    """(receiving stage, seconds from the start of the send to the end of a receive that was already waited on)."""
    feedback: tuple[float, ...]
    """Seconds from the last stage's send of a plan's sampled rows until the first stage has received them."""


class LinkLatency:
    """Latency of the links between stages, matched from the times that both ends report with each clock exchange.

    A sample of the plans, each measured once. Readings of two stages are compared on the engine's clock, so a
    latency is wrong by up to the two clocks' error bounds.
    """

    def __init__(self, stage_count: int) -> None:
        self._stage_count = stage_count
        self._newest: dict[int, Mapping[int, PlanMoments]] = {}
        self._seen: dict[str, int] = {}

    def observed(self, stage: int, moments: tuple[PlanMoments, ...], offset: Callable[[int], int | None]) -> Latencies:
        """A stage reported its newest plans; `offset(stage)` is its clock minus the engine's, None while unknown."""
        self._newest[stage] = {one.seq: one for one in moments}
        transfers: list[tuple[int, float]] = []
        for receiver in (stage, stage + 1):
            if 0 < receiver < self._stage_count and (shift := _shift(offset, receiver, receiver - 1)) is not None:
                transfers += [(receiver, seconds) for seconds in self._transfers(receiver, shift)]
        feedback: list[float] = []
        last = self._stage_count - 1
        if last > 0 and stage in (0, last) and (shift := _shift(offset, 0, last)) is not None:
            feedback = self._feedback(last, shift)
        return Latencies(tuple(transfers), tuple(feedback))

    def _transfers(self, receiver: int, shift: int) -> list[float]:
        sent, got = self._newest.get(receiver - 1, {}), self._newest.get(receiver, {})
        found: list[float] = []
        for seq in self._unseen(f"hidden {receiver}", sorted(sent.keys() & got.keys())):
            began, waiting, received = sent[seq].send_began, got[seq].receive_began, got[seq].received
            if began is None or waiting is None or received is None or waiting - shift > began:
                continue  # The tensor waited for the stage, so this sample doesn't measure the link.
            found.append(max(0, received - shift - began) / 1e9)
        return found

    def _feedback(self, last: int, shift: int) -> list[float]:
        sent, first = self._newest.get(last, {}), self._newest.get(0, {})
        takers = sorted((one for one in first.values() if one.feedback_received is not None), key=lambda one: one.seq)
        if not takers:
            return []
        reached = [seq for seq in sorted(sent) if takers[0].feedback_through < seq <= takers[-1].feedback_through]
        found: list[float] = []
        for seq in self._unseen("feedback", reached):
            began = sent[seq].feedback_send_began
            taken = next(one.feedback_received for one in takers if one.feedback_through >= seq)
            if began is not None and taken is not None:
                found.append(max(0, taken - shift - began) / 1e9)
        return found

    def _unseen(self, link: str, seqs: list[int]) -> list[int]:
        after = self._seen.get(link, -1)
        fresh = [seq for seq in seqs if seq > after]
        if fresh:
            self._seen[link] = fresh[-1]
        return fresh


def _shift(offset: Callable[[int], int | None], of: int, against: int) -> int | None:
    """Clock of stage `of` minus clock of stage `against`; None while one of them is unknown."""
    one, other = offset(of), offset(against)
    return None if one is None or other is None else one - other
