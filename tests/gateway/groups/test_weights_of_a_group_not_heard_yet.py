"""An answer that has begun waits to hear what weights a group computes with before it goes on there."""

import threading
from pathlib import Path
from typing import Any

import pytest

from chaos.continued_answers import TEXT, Streamed, read, rest_of
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import Drop, Hold, ScriptedEngine
from stageline_gateway.settings import GatewaySettings

STREAM: dict[str, Any] = {"model": MODEL, "prompt": "Count.", "max_tokens": 20, "stream": True}
PROBE_SECONDS = 2.0
"""Long beside what all else takes, so that a group that just came would not have been asked yet by a look at times."""


def stream(gateway: RunningGateway, into: list[Streamed]) -> threading.Thread:
    def ask() -> None:
        with gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
            into.append(read("".join(streaming.iter_text())))

    asking = threading.Thread(target=ask)
    asking.start()
    return asking


@pytest.mark.parametrize("weights", ["same", "other"])
def test_a_group_that_comes_back_continues_an_answer_only_with_the_weights_it_began_with(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine, weights: str
) -> None:
    engine.weights, other_engine.weights = "same", weights
    engine.script = lambda request: [*rest_of(request, Drop(), 3)[:-1], Hold(), Drop()]
    other_engine.script = rest_of
    engine.hold()
    settings = GatewaySettings(
        tmp_path / "endpoints.json",
        probe_interval_seconds=PROBE_SECONDS,
        probe_timeout_seconds=PROBE_SECONDS,
        resume_window_seconds=3.0,
    )
    seen: list[Streamed] = []
    with running_gateway(settings) as gateway:
        before = group(engine.url, 0)
        gateway.serve(before)
        eventually(lambda: engine.probes > 0, "not probed")
        asking = stream(gateway, seen)
        eventually(lambda: len(engine.requests) == 1, "not asked")
        gateway.serve(before.model_copy(update={"ready": False}))
        engine.release()
        after = before.model_copy(update={"url": other_engine.url, "incarnation": before.incarnation + 1})
        gateway.serve(after)
        asking.join(60)
    [answer] = seen
    if weights == "same":
        assert (answer.text, answer.errors) == (TEXT, []), answer
    else:
        assert (len(other_engine.requests), len(answer.errors)) == (0, 1), (answer, other_engine.requests)
