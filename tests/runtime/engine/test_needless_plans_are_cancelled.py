"""What nobody waits for any more is told to the stages at once, not with the next result: they may yet skip it."""

import asyncio

from processes.core_answers import submit
from stageline_api.engine_http import ModelInfo
from stageline_api.health import Phase
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.plan_bus.messages import Begun, Cancel, RequestSampling, SampledRow, StepDone, StepPlan, ToStage
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import FREE

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8) * 2 + (1, 2)


class ThreeStages:
    """Keeps what a core sends to stages that answer by hand; its one request repeats itself."""

    def __init__(self) -> None:
        self.sent: list[ToStage] = []
        info = ModelInfo(served_name="x", max_model_len=128, vocab_size=99, eos_token_ids=())
        self.core = EngineCore(info, EngineMetrics("x"))
        ledger = SlotLedger(3, 2, 128, num_blocks=8)
        speculation = Speculation(3, 2, FREE)
        self.core.attach(
            Scheduler(ledger, max_step_tokens=64, max_waiting=9, speculation=speculation), self.sent.append
        )
        self.core.set_phase(Phase.READY)

    def ask(self, name: str, prompt: tuple[int, ...], priority: int = 0) -> None:
        sampling = RequestSampling(temperature=0.0, num_prompt_tokens=len(prompt))
        request = AdmittedRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            max_new_tokens=4 if priority else 40,
            stop_token_ids=frozenset(),
            priority=priority,
        )
        submit(self.core, request)

    async def begin_chain(self) -> list[int]:
        """Fill the stages with a chain; the numbers of its plans."""
        self.ask("a", PROMPT)
        await asyncio.sleep(0)
        self.core.step_done(StepDone(self.newest.seq, (SampledRow(0, 1, 3),)))
        chain = []
        for _ in range(3):
            chain.append(self.newest.seq)
            self.core.begun(Begun(self.newest.seq))
        return chain

    @property
    def newest(self) -> StepPlan:
        return [message for message in self.sent if isinstance(message, StepPlan)][-1]

    @property
    def cancelled(self) -> list[int]:
        return [message.seq for message in self.sent if isinstance(message, Cancel)]

    def counted(self) -> bool:
        page = self.core.metrics_page()[0].decode()
        return f'stageline_engine_cancelled_plans_total{{model_name="x"}} {float(len(self.cancelled))}' in page


def test_the_chain_of_a_client_that_leaves() -> None:
    async def run() -> None:
        stages = ThreeStages()
        chain = await stages.begin_chain()
        assert (len(set(chain)), stages.cancelled) == (3, [])
        stages.core.abort("a")
        await asyncio.sleep(0)
        assert stages.cancelled == chain[1:], "the first one's newest token is known, and may be indexed"
        assert stages.counted()

    asyncio.run(run())


def test_the_chain_of_a_request_that_loses_its_slot_before_the_plan_that_took_it() -> None:
    async def run() -> None:
        stages = ThreeStages()
        chain = await stages.begin_chain()
        stages.ask("b", tuple(range(20, 134)), priority=-1)
        await asyncio.sleep(0)
        *_, newest = stages.sent
        assert stages.cancelled == chain[1:]
        assert isinstance(newest, StepPlan), "they hear of it before the plan that would wait behind the chain"
        assert newest.rows[0].token_ids[0] == 20
        assert stages.counted()

    asyncio.run(run())
