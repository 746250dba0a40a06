"""Asks the stages for their clocks and newest plans, and keeps what follows: clock offsets and link latencies.

One question per stage is out at a time, about one a second; a stage answers between two plans.
"""

import time
from collections.abc import Callable, Iterable

from stageline_api.telemetry.timeline import GroupClocks
from stageline_runtime.engine.group.link_latency import LinkLatency
from stageline_runtime.engine.group.stage_clocks import StageClocks
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.plan_bus.messages import Ping, Pong


class StageProbe:
    """One group's. Used on the engine's event loop."""

    def __init__(
        self, stage_count: int, metrics: EngineMetrics, now_nanoseconds: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._metrics = metrics
        self._now = now_nanoseconds
        self._clocks = StageClocks()
        self._links = LinkLatency(stage_count)

    def ask(self, stages: Iterable[int], send: Callable[[int, Ping], None]) -> None:
        """Send a `Ping` to each of `stages` that is due."""
        for stage in stages:
            if self._clocks.due(stage, self._now()):
                send(stage, Ping(self._now()))

    def answered(self, stage: int, pong: Pong) -> None:
        """A stage's answer came."""
        now = self._now()
        self._clocks.answered(stage, pong, now)

        latencies = self._links.told(stage, pong.moments, self.offset)
        for receiver, seconds in latencies.transfers:
            self._metrics.p2p_latency(receiver).observe(seconds)
        for seconds in latencies.feedback:
            self._metrics.feedback_latency.observe(seconds)

    def offset(self, stage: int) -> int | None:
        """A stage's clock minus this one's, in nanoseconds; None before the first comparison."""
        best = self._clocks.best(stage, self._now())
        return None if best is None else best.offset_nanoseconds

    def report(self) -> GroupClocks:
        """The stages' clocks against this one's."""
        return self._clocks.report(self._now())
