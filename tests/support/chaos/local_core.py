"""The engine's end of a local group with the real `EngineCore` in it, and clients that read its streams.

The core's event loop turns only when the interleaving draws its turn, one round of callbacks at a time; so a client may
read late, leave while tokens wait in its queue, or come while the core has yet to pump.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, assert_never

from chaos.interleaving import Interleaving
from chaos.local_engine import LocalEngine
from chaos.local_workloads import Ask, Workload
from processes.core_answers import submit
from stageline_api.engine_http import FinishReason, ModelInfo
from stageline_api.health import Phase
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, EndEvent, FailEvent, PromptEvent, TokenEvent
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.plan_bus.messages import Drafted, StepDone, StepPlan, ToStage, WorkOutstanding

TURNS_OF_AN_ACT = 6
"""Rounds of callbacks after which nothing is left of an act: pump, wake a reader, read, clean up."""


class LocalCore(LocalEngine):
    """Acts out a workload through the core's own port."""

    def __init__(
        self, workload: Workload, expected: Callable[[Ask], tuple[int, ...]], interleaving: Interleaving
    ) -> None:
        super().__init__(workload, expected, interleaving)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_error)
        self._errors: list[BaseException] = []
        self._turns_wanted = 0
        self._outstanding = False
        self._readers: dict[str, asyncio.Task[None]] = {}
        info = ModelInfo(served_name="x", max_model_len=1, vocab_size=1, eos_token_ids=())
        self._core = EngineCore(info, EngineMetrics("x"))
        self._core.set_phase(Phase.READY)
        self._core.attach(self.scheduler, self._take_message)
        interleaving.add_event("engine loop", lambda: self._turns_wanted > 0, self._turn)

    def close(self) -> None:
        """Give up whoever still reads, and close the loop."""
        self._loop.run_until_complete(self._give_up())
        self._loop.close()

    async def _give_up(self) -> None:
        for reader in self._readers.values():
            reader.cancel()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def _note_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._errors.append(context.get("exception") or AssertionError(context["message"]))

    def _take_message(self, message: ToStage) -> None:
        match message:
            case StepPlan():
                self._send_plan(message)
            case WorkOutstanding(outstanding=outstanding):
                assert outstanding != self._outstanding, f"outstanding is {outstanding} already"
                self._outstanding = outstanding
            case _:
                raise AssertionError(f"the core sent {message}")

    def _turn(self) -> None:
        """One round of the callbacks that are due."""
        self._turns_wanted -= 1
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        for reader in self._readers.values():
            if reader.done() and not reader.cancelled():
                reader.result()
        if self._errors:
            raise self._errors[0]

    def _in_loop(self, act: Callable[[], object]) -> None:
        self._loop.call_soon(act)
        self._turns_wanted += TURNS_OF_AN_ACT
        self._turn()

    def _idle(self) -> bool:
        return super()._idle() and not self._turns_wanted and all(reader.done() for reader in self._readers.values())

    def _pump(self) -> None:
        self._pump_wanted = False  # the core does it by itself

    def _complete(self, done: StepDone) -> None:
        self._in_loop(lambda: self._core.step_done(done))

    def _take_drafts(self, drafted: Drafted) -> None:
        self._in_loop(lambda: self._core.drafted(drafted))

    def _submit(self, name: str, ask: Ask, generated: tuple[int, ...]) -> None:
        request = AdmittedRequest(
            request_id=name,
            prompt_token_ids=ask.prompt,
            sampling=ask.sampling,
            max_new_tokens=ask.max_new_tokens,
            stop_token_ids=ask.stop_token_ids,
            generated_token_ids=generated,
            priority=ask.priority,
            prompt_told=ask.prompt_told,
        )

        def submit_and_read() -> None:
            self._readers[name] = self._loop.create_task(self._read(name, submit(self._core, request)))

        self._in_loop(submit_and_read)

    def _leave(self, name: str) -> None:
        """Every other client stays to hear how it ends; the others hang up first."""
        hangs_up = len(self.outputs[name]) % 2 == 0

        def leave() -> None:
            if hangs_up:
                self._readers[name].cancel()
            self._core.abort(name)

        self._in_loop(leave)

    async def _read(self, name: str, stream: AsyncIterator[CoreEvent]) -> None:
        ended: list[FinishReason] = []
        async for event in stream:
            assert not ended, f"{name}: {event} after the end"
            match event:
                case PromptEvent(report=report):
                    self._take_report(name, report)
                case TokenEvent(token_ids=tokens):
                    for token in tokens:
                        self._take(name, token)
                case EndEvent(reason=reason):
                    self._check_end(name, reason)
                    ended.append(reason)
                case FailEvent(message=message):
                    raise AssertionError(f"{name} failed: {message}")
                case _:
                    assert_never(event)
        assert ended, f"the stream of {name} has no end"

    def _check_end(self, name: str, reason: FinishReason) -> None:
        output, expected = tuple(self.outputs[name]), self.expected(self.asks[name])
        if reason is FinishReason.ABORT:
            assert name not in self.live, f"{name} was aborted by nobody"
            return
        assert output == expected, f"{name} ended with {output} instead of {expected}"
        stopped = expected[-1] in self.asks[name].stop_token_ids
        assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH), f"{name} ended with {reason}"
        self.live.discard(name)
