"""A group that drains is left only for one that has room: what would be refused there may end where it is."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chaos.continued_answers import TEXT, read, rest_of
from processes.gateway_harness import MODEL, eventually, group, running_gateway, write_endpoints
from processes.scripted_engine import Hold, Refuse, Say, ScriptedEngine, Step
from stageline_api.endpoints import Endpoints
from stageline_api.engine_http import (
    Admitted,
    EngineError,
    ErrorCode,
    GenerateRequest,
    SamplingParams,
    TextPrompt,
)
from stageline_api.health import Phase
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.run_events import EngineLostError, LossKind
from stageline_gateway.groups.backends import Backends, DiscoveredGroups
from stageline_gateway.groups.routing import identity
from stageline_gateway.relay.placement import Progress, Runs
from stageline_gateway.settings import GatewaySettings

STREAM: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 20, "stream": True}
LEFT = "stageline_gateway_engine_losses_total"
PATIENCE_SECONDS = 0.2
SEVERAL_PROBES = 10
"""More than last for the patience."""
DRAINS: dict[str, Callable[[GenerateRequest], list[Step]]] = {
    "queued": lambda _: [Say(Admitted(prompt_tokens=3)), Hold()],
    "answering": lambda request: rest_of(request, Hold(), 3),
}


def settings_in(directory: Path) -> GatewaySettings:
    return GatewaySettings(
        directory / "room.json",
        probe_interval_seconds=0.05,
        probe_timeout_seconds=60,
        drain_patience_seconds=PATIENCE_SECONDS,
    )


@pytest.mark.parametrize("script", DRAINS.values(), ids=DRAINS.keys())
def test_a_draining_group_is_not_left_while_the_queue_of_the_other_is_full(
    tmp_path: Path,
    engine: ScriptedEngine,
    other_engine: ScriptedEngine,
    script: Callable[[GenerateRequest], list[Step]],
) -> None:
    engine.script, other_engine.script = script, rest_of
    other_engine.queue_room = 0
    with running_gateway(settings_in(tmp_path)) as gateway:

        def left() -> float:
            return gateway.sample(LEFT, model_name=MODEL, kind="left")

        gateway.serve(group(engine.url, 0))
        with gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
            parts = streaming.iter_text()
            body = ""  # its status has come, so it was admitted
            [listed] = Endpoints.model_validate_json(gateway.endpoints.read_text()).groups
            write_endpoints(gateway.endpoints, listed, group(other_engine.url, 1))
            eventually(lambda: other_engine.probes >= 2, "the other group was not probed")
            engine.phase = Phase.DRAINING

            def is_draining() -> bool:
                [shown] = gateway.http.get("/v1/models").json()["data"]
                return bool(shown["groups"][0]["draining"])

            eventually(is_draining, "the gateway does not see the drain")
            probes = engine.probes
            eventually(lambda: engine.probes >= probes + SEVERAL_PROBES, "not probed")
            assert left() == 0, "it would wait for a place there, though it has one here"
            other_engine.queue_room = 1
            eventually(lambda: left() == 1, "there is room now")
            body += "".join(parts)
    seen = read(body)
    assert (seen.text, seen.errors) == (TEXT, []), seen


def test_a_request_that_can_go_nowhere_else_ends_on_the_group_that_drains(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    engine.script = lambda request: [*rest_of(request, Hold(), 3), *rest_of(request)[4:]]
    full = EngineError(code=ErrorCode.QUEUE_FULL, message="1024 requests are waiting already")
    other_engine.script = lambda _: [Refuse(503, full)]
    other_engine.queue_room = 0
    with running_gateway(settings_in(tmp_path)) as gateway:
        gateway.serve(group(engine.url, 0))
        with gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
            parts = streaming.iter_text()
            body = ""  # its status has come, so it was admitted
            [listed] = Endpoints.model_validate_json(gateway.endpoints.read_text()).groups
            write_endpoints(gateway.endpoints, listed, group(other_engine.url, 1))
            eventually(lambda: other_engine.probes >= 2, "the other group was not probed")
            engine.phase = Phase.DRAINING
            probes = engine.probes
            eventually(lambda: engine.probes >= probes + SEVERAL_PROBES, "not probed")
            engine.release()
            body += "".join(parts)
        seen = read(body)
        assert (seen.text, seen.errors, seen.comments) == (TEXT, [], []), "the same run, to its end"
        assert not other_engine.requests


def test_as_many_leave_a_draining_group_as_there_is_room_for() -> None:
    async def run() -> None:
        draining, other = group("http://127.0.0.1:1", 0), group("http://127.0.0.1:2", 1)
        backends = Backends(DiscoveredGroups("a test"))
        runs = Runs(backends)
        endpoints = Endpoints(groups=(draining.model_copy(update={"ready": False, "draining": True}), other))
        backends.discovered.accept(endpoints)
        backends.take(endpoints)
        connections = [EngineConnection() for _ in range(5)]
        waits = [asyncio.create_task(connection.line(60.0)) for connection in connections]
        await asyncio.sleep(0)

        async def leaving() -> int:
            runs.review()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return sum(wait.done() for wait in waits)

        request = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"), sampling=SamplingParams())
        for connection in connections:
            under_way.enter_context(runs.under_way(draining, Progress(request))).opened(connection)
        backends.queue_rooms[identity(other)] = 2
        assert await leaving() == 2
        assert await leaving() == 2, "they take up the room that the last probe found"
        backends.queue_rooms[identity(other)] = 5
        backends.refused_as_full(identity(other))
        assert await leaving() == 2
        backends.queue_rooms[identity(other)] = 1
        assert await leaving() == 3
        del backends.queue_rooms[identity(other)]
        assert await leaving() == 5, "an engine that doesn't say is asked"
        ends = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(end, EngineLostError) and end.kind is LossKind.LEFT for end in ends), ends

    with ExitStack() as under_way:
        asyncio.run(run())
