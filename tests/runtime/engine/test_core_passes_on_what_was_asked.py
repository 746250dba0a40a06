"""What a request asks of the scheduler gets there through the core, and what the cache saved comes back."""

import asyncio
from collections.abc import AsyncIterator

from processes.core_answers import submit
from stageline_api.engine_http import ModelInfo
from stageline_api.health import Phase
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, TokenEvent
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.plan_bus.messages import RequestSampling, SampledRow, StepDone, StepPlan, ToStage


class OneStage:
    """Answers every plan with token 7, in the next turn of the loop."""

    def __init__(self, slots: int) -> None:
        self.plans: list[StepPlan] = []
        self.core = EngineCore(
            ModelInfo(served_name="x", max_model_len=64, vocab_size=99, eos_token_ids=()), EngineMetrics("x")
        )
        ledger = SlotLedger(1, slots, 64, prefix_cache=True)
        self.core.attach(Scheduler(ledger, max_step_tokens=64, max_waiting=9), self.take)
        self.core.set_phase(Phase.READY)

    def take(self, message: ToStage) -> None:
        if isinstance(message, StepPlan):
            self.plans.append(message)
            rows = tuple(SampledRow(row.slot, row.generation, 7) for row in message.sampled_rows)
            asyncio.get_running_loop().call_soon(self.core.step_done, StepDone(message.seq, rows))

    def submit(
        self,
        name: str,
        prompt: tuple[int, ...],
        *,
        priority: int = 0,
        generated: tuple[int, ...] = (),
        new_tokens: int = 3,
    ) -> AsyncIterator[CoreEvent]:
        return submit(
            self.core,
            AdmittedRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling=RequestSampling(temperature=0.0, num_prompt_tokens=len(prompt)),
                max_new_tokens=new_tokens,
                stop_token_ids=frozenset(),
                generated_token_ids=generated,
                priority=priority,
            ),
        )


async def tokens_of(events: AsyncIterator[CoreEvent]) -> list[TokenEvent]:
    return [event async for event in events if isinstance(event, TokenEvent)]


def test_the_lower_priority_number_runs_first() -> None:
    async def run() -> list[int]:
        stage = OneStage(slots=1)
        streams = [stage.submit(str(number), (number,), priority=number) for number in (3, 1, 2)]
        await asyncio.gather(*map(tokens_of, streams))
        return [row.token_ids[0] for plan in stage.plans for row in plan.rows if row.token_ids]

    assert asyncio.run(run()) == [1, 2, 3]


def test_generated_tokens_are_inputs_and_only_new_ones_come_back() -> None:
    async def run() -> tuple[OneStage, list[TokenEvent]]:
        stage = OneStage(slots=1)
        return stage, await tokens_of(stage.submit("a", (1, 2), generated=(7,)))

    stage, events = asyncio.run(run())
    assert stage.plans[0].rows[0].token_ids == (1, 2, 7)
    assert stage.plans[0].fills[0].sampling.num_prompt_tokens == 2
    assert [event.token_ids for event in events] == [(7,), (7,)]


def test_tokens_say_how_much_of_the_prompt_was_cached() -> None:
    async def run() -> list[int]:
        stage = OneStage(slots=2)
        found = []
        for name in "ab":
            events = await tokens_of(stage.submit(name, tuple(range(40))))
            found.append(events[0].cached_prompt_tokens)
        assert b"stageline_prefix_cache_hits_total" in stage.core.metrics_page()[0]
        return found

    assert asyncio.run(run()) == [0, 32]


def test_steps_are_told_while_a_request_has_no_slot() -> None:
    async def run() -> None:
        stage = OneStage(slots=1)
        first, second = stage.submit("first", (1,), new_tokens=40), stage.submit("second", (2,))
        await asyncio.sleep(0)
        before = stage.core.steps_while_queued("second")
        assert before == len(stage.plans) > 0
        assert stage.core.steps_while_queued("first") is None, "it runs"
        assert stage.core.steps_while_queued("nobody") is None
        await anext(first)
        assert stage.core.steps_while_queued("second") == len(stage.plans) > before
        await asyncio.gather(tokens_of(first), tokens_of(second))
        assert stage.core.steps_while_queued("second") is None, "it has ended"

    asyncio.run(run())
