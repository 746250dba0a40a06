"""Several choices deliver through one function: one at a time, one Admitted for all, nothing after a failure."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_api.engine_http import (
    Admitted,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TextPrompt,
)
from stageline_gateway.engine_client.generation import EngineClient, EngineTimeouts
from stageline_gateway.engine_client.incoming_lines import Pause
from stageline_gateway.engine_client.run_events import AnswerFailedError, StreamEvent, TakeEvents
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import EngineAddress
from stageline_gateway.errors import ApiError
from stageline_gateway.groups.backends import Backends, DiscoveredGroups
from stageline_gateway.relay.dispatch import Deliver, Dispatcher, GenerateJob
from stageline_gateway.relay.placement import RetryPolicy, Runs
from stageline_gateway.telemetry.metrics import GatewayMetrics

MODEL = "m"
NUM_CHOICES = 3
FAILS = 1
DELTAS = 20


class ScriptedEvents(EngineClient):
    """Generates without a network; choice `FAILS` fails after its first Delta if told to."""

    def __init__(self, fails: bool) -> None:
        super().__init__(EngineTimeouts(), EngineKey())
        self.fails = fails
        self.opened = self.closed = 0

    async def generate(
        self,
        engine: EngineAddress,  # noqa: ARG002 - the client's signature
        request: GenerateRequest,
        take: TakeEvents,
        on_open: Callable[[Any], None] = lambda _: None,  # noqa: ARG002 - the client's signature
    ) -> None:
        async def say(*events: Admitted | Delta | Finished) -> None:
            await asyncio.sleep(0)
            if (pause := take(events)) is not None:
                await pause()

        self.opened += 1
        choice = request.sampling.choice
        try:
            await say(Admitted(prompt_tokens=1), Delta(text=f"{choice}.0", token_ids=(0,)))
            if self.fails and choice == FAILS:
                raise AnswerFailedError("It can't be finished.")
            for number in range(1, DELTAS):
                await say(Delta(text=f"{choice}.{number}", token_ids=(number,)))
            await say(Finished(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=DELTAS))
        finally:
            self.closed += 1


async def run_with(engine: ScriptedEvents, deliver: Deliver) -> None:
    groups = DiscoveredGroups("a test")
    groups.accept(Endpoints(groups=(GroupEndpoint(model=MODEL, group=0, incarnation=1, url="http://e", ready=True),)))
    backends = Backends(groups)
    dispatcher = Dispatcher(backends, engine, Runs(backends), GatewayMetrics().of(""), RetryPolicy())
    request = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"), sampling=SamplingParams(max_tokens=DELTAS))
    await dispatcher.run_choices(GenerateJob(MODEL, request), NUM_CHOICES, deliver)


async def run(engine: ScriptedEvents, seen: list[tuple[int, StreamEvent]]) -> None:
    """Run all choices with a reader that has them wait a while after every event."""
    awaited = False

    async def read() -> None:
        nonlocal awaited
        for _ in range(5):
            await asyncio.sleep(0)
        awaited = False

    def deliver(choice: int, events: Sequence[StreamEvent]) -> Pause:
        nonlocal awaited
        assert not awaited, f"choice {choice} delivers while another one waits for the reader"
        awaited = True
        seen.extend((choice, event) for event in events)
        return read

    await run_with(engine, deliver)


def test_every_choice_is_delivered_in_its_order_behind_one_admitted() -> None:
    engine, seen = ScriptedEvents(fails=False), list[tuple[int, StreamEvent]]()
    asyncio.run(run(engine, seen))
    assert [isinstance(event, Admitted) for _, event in seen] == [True] + [False] * (len(seen) - 1), seen
    for choice in range(NUM_CHOICES):
        own = [event for number, event in seen[1:] if number == choice]
        assert [event.text for event in own[:-1] if isinstance(event, Delta)] == [
            f"{choice}.{n}" for n in range(DELTAS)
        ]
        assert isinstance(own[-1], Finished), own
    assert (engine.opened, engine.closed) == (NUM_CHOICES, NUM_CHOICES)


def test_a_failure_comes_behind_the_events_before_it_and_ends_all() -> None:
    engine, seen = ScriptedEvents(fails=True), list[tuple[int, StreamEvent]]()
    with pytest.raises(ApiError) as failure:
        asyncio.run(run(engine, seen))
    assert failure.value.code == "answer_failed"
    failed = [event for number, event in seen if number == FAILS and isinstance(event, Delta)]
    assert [event.text for event in failed] == [f"{FAILS}.0"], seen
    others = [event for number, event in seen if number != FAILS and isinstance(event, Delta)]
    assert len(others) < DELTAS, f"the other choices went on: {seen}"
    assert (engine.opened, engine.closed) == (NUM_CHOICES, NUM_CHOICES)


def test_a_deliver_that_refuses_an_event_ends_all_at_once() -> None:
    """Its turn is not given back, and whoever then waits for one must not wait for ever."""

    def refuse(choice: int, events: Sequence[StreamEvent]) -> None:  # noqa: ARG001 - the signature of a deliver
        raise ApiError(500, "It can't be written.", "server_error", "answer_failed")

    engine = ScriptedEvents(fails=False)
    with pytest.raises(ApiError, match="can't be written"):
        asyncio.run(asyncio.wait_for(run_with(engine, refuse), timeout=60))
    assert engine.opened == engine.closed == NUM_CHOICES
