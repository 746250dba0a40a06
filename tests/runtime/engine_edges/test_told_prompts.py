"""A prompt's tokens as an engine tells them: each once, in order, before the answer, in pieces, within bounds."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from processes.scripted_core_server import EOS_TOKEN_ID, Script, ScriptedCore, ids_of, says, serve, until
from stageline_api.engine_http import Admitted, Delta, Event, Finished, FinishReason, PromptToken, PromptTokens
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, EndEvent, PromptEvent, TokenEvent
from stageline_runtime.engine.edge.prompt_room import PromptRoom
from stageline_runtime.engine.text.told_prompt import PIECE_ENTRIES
from stageline_runtime.plan_bus.messages import PromptReport, TokenLogprobs
from stageline_runtime.plan_bus.prompt_report import packed

EVENT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)
TEXT = "hello" * 200


def body(prompt: str = "hello", request_id: str = "r1", **sampling: Any) -> dict[str, Any]:
    return {"request_id": request_id, "prompt": {"kind": "text", "text": prompt}, "sampling": sampling}


def report(position: int, count: int, top_count: int) -> PromptReport:
    """Values that follow from a token's place in the prompt."""
    places = range(position, position + count)
    top = [(place, rank) for place in places for rank in range(top_count)]
    return PromptReport(
        slot=0,
        generation=1,
        position=position,
        top_count=top_count,
        logprobs=packed("f", (-place / 2 for place in places)),
        ranks=packed("i", places),
        top_ids=packed("i", (4 + rank for _, rank in top)),
        top_logprobs=packed("f", (-float(rank) for _, rank in top)),
    )


def tells(chunk: int, script: Script) -> Script:
    """As a core does: reports of so many tokens at once, then `script`."""

    async def play(request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        first, end = max(1, request.prompt_told or 0), len(request.prompt_token_ids)
        if (top_count := request.sampling.num_top_prompt_logprobs) is not None:
            for start in range(first, end, chunk):
                yield PromptEvent(report(start, min(chunk, end - start), top_count))
        async for event in script(request):
            yield event

    return play


async def answered(client: httpx.AsyncClient, request: dict[str, Any]) -> list[Any]:
    response = await client.post("/v1/generate", json=request)
    assert response.status_code == 200, response.text
    return [EVENT.decode(line) for line in response.text.splitlines() if line]


def generate(directory: Path, script: Script, request: dict[str, Any]) -> list[Any]:
    async def run() -> list[Any]:
        async with serve(ScriptedCore(script), directory) as client:
            return await answered(client, request)

    return asyncio.run(run())


def told(events: list[Any]) -> list[PromptToken]:
    """The prompt's tokens, which stand between the first event and the answer."""
    pieces = [event for event in events if isinstance(event, PromptTokens)]
    assert isinstance(events[0], Admitted)
    assert events[1 : 1 + len(pieces)] == pieces, events
    return [one for piece in pieces for one in piece.tokens]


@pytest.mark.parametrize("known", [0, 2, 5])
def test_tokens_alone_are_told_at_once(tmp_path: Path, known: int) -> None:
    tokens = told(generate(tmp_path, says("x"), body(prompt_told=known)))
    assert [one.token_id for one in tokens] == list(ids_of("hello")[known:])
    assert bytes(byte for one in tokens for byte in one.bytes) == b"hello"[known:]
    assert {one.logprob for one in tokens} <= {None}


@pytest.mark.parametrize("top_count", [0, 3])
@pytest.mark.parametrize("known", [0, 1, 700])
def test_log_probabilities_come_as_they_are_known(tmp_path: Path, top_count: int, known: int) -> None:
    events = generate(tmp_path, tells(600, says("x")), body(TEXT, prompt_logprobs=top_count, prompt_told=known))
    tokens = told(events)
    assert [one.token_id for one in tokens] == list(ids_of(TEXT)[known:])
    for place, one in enumerate(tokens, start=known):
        if place == 0:
            assert (one.logprob, one.rank, one.top_logprobs) == (None, None, ())
            continue
        assert one.logprob == -place / 2
        assert one.rank == place
        assert [(top.token_id, top.bytes, top.logprob) for top in one.top_logprobs] == [
            (4 + rank, (rank,), -rank) for rank in range(top_count)
        ]
    sizes = [len(event.tokens) for event in events if isinstance(event, PromptTokens)]
    assert max(sizes) * (1 + top_count) <= PIECE_ENTRIES
    assert isinstance(events[-2], Delta)


def test_who_wants_the_prompt_alone_gets_no_output(tmp_path: Path) -> None:
    asked = body(prompt_logprobs=0, prompt_told=0, prompt_only=True, max_tokens=1)
    events = generate(tmp_path, tells(5, says("x")), asked)
    assert len(told(events)) == 5
    assert not [event for event in events if isinstance(event, Delta)]
    assert events[-1] == Finished(reason=FinishReason.LENGTH, prompt_tokens=5, completion_tokens=0)


@pytest.mark.parametrize("lists", [True, None])
def test_a_stop_token_is_listed_for_who_wants_it(tmp_path: Path, lists: bool | None) -> None:
    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        for token in (*ids_of("a"), EOS_TOKEN_ID):
            yield TokenEvent((token,), (TokenLogprobs(-1.0, ()),))
        yield EndEvent(FinishReason.STOP)

    events = generate(tmp_path, play, body(top_logprobs=0, lists_stop_token=lists))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(one.text for one in deltas) == "a"
    listed = [one.token_id for delta in deltas for one in delta.logprobs]
    assert listed == [*ids_of("a"), *([EOS_TOKEN_ID] if lists else [])]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"prompt_told": 6}, "prompt_told"),
        ({"prompt_only": True, "max_tokens": 2}, "prompt_only"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_can_not_be_told_is_refused_by_name(tmp_path: Path, sampling: dict[str, Any], param: str) -> None:
    async def run() -> httpx.Response:
        async with serve(ScriptedCore(says("x")), tmp_path) as client:
            return await client.post("/v1/generate", json=body(**sampling))

    refused = asyncio.run(run())
    assert refused.status_code == 400, refused.text
    assert param in refused.json()["message"]


def test_what_waits_for_clients_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted when a request comes, by the most it may need, and until its stream has ended."""
    room = PromptRoom(limit_bytes=100)
    monkeypatch.setattr("stageline_runtime.engine.edge.generation.PromptRoom", lambda: room)
    goes_on = asyncio.Event()

    async def waits(request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        await goes_on.wait()
        async for event in says("x")(request):
            yield event

    async def run() -> list[httpx.Response]:
        async with serve(ScriptedCore(tells(5, waits)), tmp_path) as client:
            too_large = body(TEXT, prompt_logprobs=0, prompt_told=0)
            never = await client.post("/v1/generate", json=too_large)
            first = asyncio.create_task(client.post("/v1/generate", json=body(prompt_logprobs=1, prompt_told=0)))
            await until(lambda: room.held_bytes == 5 * 2 * 8, "its room is counted")
            second = body(request_id="r2", prompt_logprobs=1, prompt_told=0)
            full = await client.post("/v1/generate", json=second)
            goes_on.set()
            await first
            await until(lambda: room.held_bytes == 0, "its room is given back")
            return [never, full, await client.post("/v1/generate", json=second)]

    never, full, later = asyncio.run(run())
    assert (never.status_code, never.json()["param"]) == (400, "prompt_logprobs")
    assert (full.status_code, full.json()["code"]) == (503, "queue_full")
    assert later.status_code == 200
