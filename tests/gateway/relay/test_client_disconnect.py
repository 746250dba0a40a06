"""A client that goes away takes its request with it: the engine's connection closes at once, whatever it waits for."""

import json
import socket

import httpx
import pytest

from processes.gateway_harness import MODEL, RunningGateway, eventually
from processes.scripted_engine import Hold, Say, ScriptedEngine, Step
from stageline_api.engine_http import Admitted, Delta

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
ADMITTED = Say(Admitted(prompt_tokens=1))
PIECE = Say(Delta(text="a", token_ids=(1,)))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    "steps", [[Hold()], [ADMITTED, Hold()], [ADMITTED, PIECE, Hold()]], ids=["queued", "admitted", "answering"]
)
def test_the_engine_sees_the_client_leave(
    gateway: RunningGateway, engine: ScriptedEngine, steps: list[Step], stream: bool
) -> None:
    engine.script = lambda _: steps
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": stream}).encode()
    url, begins = httpx.URL(gateway.url), stream and steps[0] == ADMITTED
    with socket.create_connection((url.host, url.port or 0), timeout=60) as client:
        client.sendall(HEAD % len(body) + body)
        eventually(lambda: reached(gateway, engine, steps), "the answer never got there")
        if begins:
            assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")
    eventually(lambda: engine.left_early, "the engine's connection stayed open")
    assert engine.left_early == [engine.requests[0].request_id]
    gateway.settle()
    code = "200" if begins else "499"
    assert gateway.sample("stageline_gateway_requests_total", model_name=MODEL, code=code) == 1
    abandoned = gateway.sample("stageline_gateway_abandoned_after_seconds_count", model_name=MODEL)
    assert abandoned == (PIECE not in steps), "who had a token gave nothing up"


def reached(gateway: RunningGateway, engine: ScriptedEngine, steps: list[Step]) -> bool:
    """Whether the gateway has had all that the engine says before it holds."""
    admissions = gateway.sample("stageline_prompt_tokens_total", model_name=MODEL)
    tokens = gateway.sample("stageline_generation_tokens_total", model_name=MODEL)
    return len(engine.requests) == 1 and (admissions, tokens) == (steps.count(ADMITTED), steps.count(PIECE))


def test_other_requests_go_on(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [ADMITTED, PIECE, Hold()]
    stay = {"model": MODEL, "prompt": "stay", "stream": True}
    with (
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=stay) as staying,
    ):
        lines = staying.iter_lines()
        eventually(lambda: '"text":"a"' in next(lines), "no first text")
        with client.stream("POST", "/v1/completions", json=stay | {"prompt": "leave"}) as leaving:
            next(leaving.iter_lines())
        eventually(lambda: engine.left_early, "the engine's connection stayed open")
        assert engine.left_early == [engine.requests[1].request_id]
        engine.release()
        assert any("engine_failed" in line for line in lines), "the script ends without Finished: said, not silent"
