"""A client that goes away takes its request with it: the engine's connection closes within a second."""

import time
from typing import Any

import httpx
import pytest

from gateway_harness import MODEL, RunningGateway, eventually
from scripted_engine import Hold, Say, ScriptedEngine, Step
from stageline_api.engine_http import Admitted, Delta

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
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "stream": stream}
    with httpx.Client(base_url=gateway.url, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.2))
    left = time.monotonic()
    eventually(lambda: engine.left_early, "the engine's connection stayed open", seconds=1.0)
    assert engine.left_early == [engine.requests[0].request_id], f"after {time.monotonic() - left:.2f} s"
    eventually(lambda: gateway.sample("stageline_gateway_requests_in_flight", model_name=MODEL) == 0, "still in flight")
    code = "200" if stream and steps[0] == ADMITTED else "499"
    assert gateway.sample("stageline_gateway_requests_total", model_name=MODEL, code=code) == 1


def test_other_requests_go_on(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [ADMITTED, PIECE, Hold()]
    stay = {"model": MODEL, "prompt": "stay", "stream": True}
    with (
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=10) as client,
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
