"""What the links between stages take, matched from the moments that both ends tell with each clock comparison. Pure.

A sample of stages asked about once a second, not every plan: the runner's thread pays nothing for it. Readings of two
stages are compared on the engine's clock, so a latency is wrong by up to the two clocks' error bounds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stageline_runtime.plan_bus.messages import PlanMoments


@dataclass(frozen=True, slots=True)
class Latencies:
    """Newly matched plans."""

    transfers: tuple[tuple[int, float], ...]
    """(receiving stage, seconds from the start of the send to the end of a receive that was already waited on)."""
    feedback: tuple[float, ...]
    """Seconds from the last stage's send of a plan's sampled rows until the first stage has taken them."""


class LinkLatency:
    """Remembers up to which plan each link has been looked at."""

    def __init__(self, stage_count: int) -> None:
        self._stage_count = stage_count
        self._newest: dict[int, Mapping[int, PlanMoments]] = {}
        self._seen: dict[str, int] = {}

    def told(self, stage: int, moments: tuple[PlanMoments, ...], offset: Callable[[int], int | None]) -> Latencies:
        """A stage told its newest plans; `offset(stage)` is its clock minus the engine's, None while unknown."""
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
                continue  # The tensor waited for the stage, which says nothing about the link.
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
