"""Cost of a decode step in the engine: `python -m stageline_bench.costs.plan_cost`.

Sixteen requests in two microbatches: the real core, scheduler, counters and frames, in this process; no sockets, and
sinks that only count. One step receives a plan's tokens, emits them, and sends the next plan. Prints microseconds of
CPU time per step, the tenth percentile, for each activity between two steps (`between_steps`). Load makes all of it
slower, so compare two states of the code alternately.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from stageline_api.engine_http import ModelInfo
from stageline_api.health import Phase
from stageline_bench.costs import between_steps
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.plan_bus.bus import FrameReader, encode_frame
from stageline_runtime.plan_bus.messages import RequestSampling, SampledRow, StepDone, StepPlan, ToEngine, ToStage

STAGES = 2
ROWS = 8
PROMPT_TOKENS = 32
SLOT_TOKENS = 4096
"""More than the steps need."""


class _Engine:
    """A core with stages that answer at once, on request."""

    def __init__(self) -> None:
        info = ModelInfo(served_name="bench", max_model_len=SLOT_TOKENS, vocab_size=1024, eos_token_ids=())
        self._core = EngineCore(info, EngineMetrics("bench"))
        ledger = SlotLedger(STAGES, ROWS, SLOT_TOKENS, prefix_cache=True)
        self._core.attach(Scheduler(ledger, max_step_tokens=512, max_waiting=64), self._send)
        self._core.set_phase(Phase.READY)
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)
        self._plans: deque[StepPlan] = deque()
        self.tokens = 0

    async def begin(self) -> None:
        """Submit as many requests as there are slots, and compute their prompts."""
        for index in range(STAGES * ROWS):
            request = AdmittedRequest(
                request_id=str(index),
                prompt_token_ids=(index + 1,) * PROMPT_TOKENS,
                sampling=RequestSampling(temperature=0.0),
                max_new_tokens=SLOT_TOKENS - PROMPT_TOKENS,
                stop_token_ids=frozenset(),
            )
            self._core.submit(request, self._count)
        await asyncio.sleep(0)  # plans are made at the end of this turn of the loop
        while not all(row.need_sample and row.num_tokens == 1 for plan in self._plans for row in plan.rows):
            self.step(self.answer())

    def answer(self) -> bytes:
        """The last stage's result of the oldest plan: not measured."""
        plan = self._plans.popleft()
        rows = tuple(SampledRow(row.slot, row.generation, 7) for row in plan.sampled_rows)
        return encode_frame(StepDone(plan.seq, rows))

    def step(self, answer: bytes) -> None:
        """Process the result, as the bus's connection does."""
        for message in self._reader.feed(answer):
            assert isinstance(message, StepDone), message
            self._core.step_done(message)

    def _send(self, message: ToStage) -> None:
        encode_frame(message)
        if isinstance(message, StepPlan):
            self._plans.append(message)

    def _count(self, _event: CoreEvent) -> None:
        self.tokens += 1


def microseconds_of_a_step(between: Callable[[], None], steps: int) -> float:
    """CPU time of the engine's thread, the tenth percentile of `steps`."""
    engine = _Engine()
    asyncio.run(engine.begin())
    spent: list[int] = []
    for _ in range(steps):
        answer = engine.answer()
        between()
        began = time.thread_time_ns()
        engine.step(answer)
        spent.append(time.thread_time_ns() - began)
    assert engine.tokens >= steps * ROWS, "steps without tokens"
    return sorted(spent)[len(spent) // 10] / 1000


def main() -> None:
    """Measure and print."""
    print("engine:", *between_steps.each(microseconds_of_a_step))  # noqa: T201


if __name__ == "__main__":
    main()
