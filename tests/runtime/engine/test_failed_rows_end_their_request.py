"""A row that the last stage can't guide any further fails its request alone, with a sentence and a free slot."""

import asyncio

from processes.core_answers import answer_of
from stageline_api.engine_http import ModelInfo
from stageline_api.health import Phase
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, FailEvent, TokenEvent
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.plan_bus.messages import RequestSampling, SampledRow, StepDone, StepPlan, ToStage


async def events_of(core: EngineCore, request_id: str) -> list[CoreEvent]:
    request = AdmittedRequest(
        request_id=request_id,
        prompt_token_ids=(3, 4),
        sampling=RequestSampling(),
        max_new_tokens=2,
        stop_token_ids=frozenset(),
    )
    return await answer_of(core, request)


async def serve_two() -> tuple[list[CoreEvent], list[CoreEvent], int]:
    core = EngineCore(ModelInfo(served_name="x", max_model_len=8, vocab_size=9, eos_token_ids=()), EngineMetrics("x"))
    scheduler = Scheduler(SlotLedger(1, 2, 8), max_step_tokens=8, max_waiting=4)

    def send(message: ToStage) -> None:
        """A stage that fails every row of slot 0."""
        if isinstance(message, StepPlan):
            rows = tuple(
                SampledRow(row.slot, row.generation, 5, None, None if row.slot else "it is lost")
                for row in message.sampled_rows
            )
            asyncio.get_running_loop().call_soon(core.step_done, StepDone(message.seq, rows))

    core.attach(scheduler, send)
    core.set_phase(Phase.READY)
    failed, good = await asyncio.gather(events_of(core, "a"), events_of(core, "b"))
    return failed, good, scheduler.num_running


def test_only_the_failed_request_ends() -> None:
    failed, good, still_running = asyncio.run(asyncio.wait_for(serve_two(), 10))
    assert failed == [FailEvent("The answer can't be guided any further: it is lost.", is_final=True)]
    assert [event.token_ids for event in good if isinstance(event, TokenEvent)] == [(5,), (5,)]
    assert still_running == 0
