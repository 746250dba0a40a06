"""A stream is never silent for long: in a queue, while a model starts, during prefill, and while an answer moves."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Drop, Hold, Raw, Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import Admitted, Delta, EngineError, ErrorCode
from stageline_gateway.settings import GatewaySettings

USER = [{"role": "user", "content": "Hi"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
COMMENT, PING = ": keep-alive\n\n", 'event: ping\ndata: {"type":"ping"}\n\n'
SIGNS = dict.fromkeys(ASKS, COMMENT) | {"/v1/messages": PING}
SETTINGS = GatewaySettings(
    None, keep_alive_seconds=0.03, hold_seconds=120, resume_window_seconds=120, probe_interval_seconds=0.05
)
everywhere = pytest.mark.parametrize("path", ASKS)


@pytest.fixture
def gateway(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """A gateway whose streams say soon that they are there, and that waits long for a group."""
    with running_gateway(replace(SETTINGS, endpoints_path=tmp_path / "endpoints.json")) as gateway:
        gateway.serve(group(engine.url))
        yield gateway


class Stream:
    """A streamed answer, read piece by piece."""

    def __init__(self, answered: httpx.Response) -> None:
        self.answered = answered
        self._pieces = answered.iter_text()
        self.text = ""

    def until(self, wanted: str, times: int = 1) -> None:
        while self.text.count(wanted) < times:
            piece = next(self._pieces, None)
            assert piece is not None, f"the stream ended without {wanted!r}: {self.text!r}"
            self.text += piece

    def rest(self) -> str:
        """All of it, without what was said in silence."""
        return self.text + "".join(self._pieces)


def asked(gateway: RunningGateway, path: str, **extra: Any) -> Any:
    return gateway.http.stream("POST", path, json=ASKS[path] | {"model": MODEL, "stream": True} | extra)


@everywhere
def test_it_says_that_it_is_there_before_it_is_admitted(
    gateway: RunningGateway, engine: ScriptedEngine, path: str
) -> None:
    engine.script = lambda _: [Raw(b"\n"), Hold(), *answer("Hello", " world")]
    with asked(gateway, path) as answered:
        stream = Stream(answered)
        stream.until(SIGNS[path], times=3)
        assert answered.status_code == 200
        engine.release()
        assert "Hello" in stream.rest()


@everywhere
@pytest.mark.parametrize("at", [1, 2], ids=["prefill", "between tokens"])
def test_it_says_so_while_the_engine_computes(
    gateway: RunningGateway, engine: ScriptedEngine, path: str, at: int
) -> None:
    steps = answer("Hello", " world")
    engine.script = lambda _: [*steps[:at], Hold(), *steps[at:]]
    with asked(gateway, path) as answered:
        stream = Stream(answered)
        stream.until(SIGNS[path], times=3)
        assert ("Hello" in stream.text) == (at == 2)
        engine.release()
        assert " world" in stream.rest()


@everywhere
def test_it_says_so_while_no_group_is_there(gateway: RunningGateway, engine: ScriptedEngine, path: str) -> None:
    gateway.serve(group(engine.url, ready=False))
    with asked(gateway, path) as answered:
        stream = Stream(answered)
        stream.until(SIGNS[path], times=2)
        gateway_has_it = group(engine.url)
        serve_from_elsewhere(gateway, gateway_has_it)
        assert "Hello" in stream.rest()


def serve_from_elsewhere(gateway: RunningGateway, *groups: Any) -> None:
    """As `serve`, by a connection of its own: the gateway's client reads a stream."""
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=60) as http:
        replace(gateway, http=http).serve(*groups)


@everywhere
def test_it_says_so_while_an_answer_moves(gateway: RunningGateway, engine: ScriptedEngine, path: str) -> None:
    begun: list[Step] = [Say(Admitted(prompt_tokens=3)), Say(Delta(text="Hello", token_ids=(1,))), Drop()]
    scripts = itertools.chain(
        [begun], itertools.repeat([Say(Admitted(prompt_tokens=3)), Hold(), *answer(" world")[1:]])
    )
    engine.script = lambda _: next(scripts)
    with asked(gateway, path) as answered:
        stream = Stream(answered)
        stream.until("Hello")
        heard = stream.text.count(SIGNS[path])
        stream.until(SIGNS[path], times=heard + 2)
        engine.release()
        assert " world" in stream.rest()


@everywhere
def test_a_refusal_after_that_is_the_streams_last_event(
    gateway: RunningGateway, engine: ScriptedEngine, path: str
) -> None:
    refusal = EngineError(code=ErrorCode.INVALID_VALUE, message="no such thing", param="stop")
    engine.script = lambda _: [Refuse(400, refusal)]
    gateway.serve(group(engine.url, ready=False))
    with asked(gateway, path) as answered:
        stream = Stream(answered)
        stream.until(SIGNS[path])
        serve_from_elsewhere(gateway, group(engine.url))
        events = stream.rest().replace(SIGNS[path], "").strip().split("\n\n")
        last = json.loads(events[-1].rpartition("data: ")[2])
        assert "no such thing" in json.dumps(last)
        if path == "/v1/responses":
            kinds = [json.loads(event.rpartition("data: ")[2])["type"] for event in events]
            assert kinds == ["response.created", "response.in_progress", "response.failed"]
            assert last["response"]["error"]["code"] == "invalid_prompt"
    gateway.settle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_several_choices_say_so_once_for_all(gateway: RunningGateway, engine: ScriptedEngine, path: str) -> None:
    engine.script = lambda _: [Hold(), *answer("Hello")]
    with asked(gateway, path, n=3) as answered:
        stream = Stream(answered)
        stream.until(COMMENT, times=2)
        engine.release()
        assert stream.rest().count("Hello") == 3


@everywhere
def test_an_answer_that_comes_soon_has_nothing_of_it(tmp_path: Path, engine: ScriptedEngine, path: str) -> None:
    settings = replace(SETTINGS, endpoints_path=tmp_path / "endpoints.json", keep_alive_seconds=600.0)
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        with asked(gateway, path) as answered:
            assert SIGNS[path] not in Stream(answered).rest()


@everywhere
def test_an_answer_at_once_is_a_whole_one(gateway: RunningGateway, engine: ScriptedEngine, path: str) -> None:
    engine.script = lambda _: [Hold(), *answer("Hello")]
    with asked(gateway, path) as answered:
        Stream(answered).until(SIGNS[path], times=2)  # as long as a stream would have said so
    engine.release()
    whole = gateway.http.post(path, json=ASKS[path] | {"model": MODEL})
    assert (whole.status_code, "keep-alive" in whole.text, "ping" in whole.text) == (200, False, False)
    assert whole.json()
