"""What clients written for other servers look for beyond an answer's text."""

from importlib.metadata import version
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway, group
from processes.scripted_engine import Say, ScriptedEngine
from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason


def cached(_: Any) -> list[Any]:
    end = Finished(reason=FinishReason.STOP, prompt_tokens=9, completion_tokens=1, cached_tokens=7)
    return [Say(Admitted(prompt_tokens=9)), Say(Delta(text="x", token_ids=(1,))), Say(end)]


@pytest.mark.parametrize("choices", [1, 2])
def test_usage_tells_how_much_of_the_prompt_was_cached(
    gateway: RunningGateway, engine: ScriptedEngine, choices: int
) -> None:
    engine.script = cached
    answered = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": choices}).json()
    assert answered["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": choices,
        "total_tokens": 9 + choices,
        "prompt_tokens_details": {"cached_tokens": 7},
    }


def test_health_is_a_status_without_a_word(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    healthy = gateway.http.get("/health")
    assert (healthy.status_code, healthy.content) == (200, b"")
    gateway.serve(group(engine.url, ready=False, message="loading"))
    assert gateway.http.get("/health").status_code == 503


def test_the_version_is_told(gateway: RunningGateway) -> None:
    assert gateway.http.get("/version").json() == {"version": version("stageline")}
