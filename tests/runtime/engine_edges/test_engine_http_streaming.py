"""Streams over a real socket: order of events, text, stop strings, counts, leaving clients, slow clients."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from processes.scripted_core_server import (
    EOS_TOKEN_ID,
    ScriptedCore,
    ids_of,
    says,
    says_forever,
    says_nothing,
    serve,
    until,
)
from stageline_api.engine_http import Admitted, Delta, Event, Failed, Finished, FinishReason
from stageline_gateway.engine_client.engine_connection import LINE_LIMIT_BYTES
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, EndEvent, FailEvent, TokenEvent
from stageline_runtime.engine.edge import answer_lines
from stageline_runtime.plan_bus.messages import TokenLogprobs

EVENT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)


def body(request_id: str = "r1", **sampling: Any) -> dict[str, Any]:
    return {"request_id": request_id, "prompt": {"kind": "text", "text": "hello"}, "sampling": sampling}


async def collect(client: httpx.AsyncClient, request: dict[str, Any]) -> list[Any]:
    async with client.stream("POST", "/v1/generate", json=request) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [EVENT.decode(line) async for line in response.aiter_lines()]


def generate(core: ScriptedCore, directory: Path, request: dict[str, Any]) -> list[Any]:
    async def run() -> list[Any]:
        async with serve(core, directory) as client:
            return await collect(client, request)

    return asyncio.run(run())


def parts(events: list[Any]) -> tuple[Admitted, str, tuple[int, ...], Finished | Failed]:
    """The first event, all text, all ids and the last event; checks the order on the way."""
    first, *deltas, last = events
    assert isinstance(first, Admitted), events
    assert all(isinstance(delta, Delta) for delta in deltas), events
    assert isinstance(last, Finished | Failed), events
    return first, "".join(d.text for d in deltas), sum((d.token_ids for d in deltas), ()), last


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
def test_a_whole_answer(tmp_path: Path, tokens_per_event: int) -> None:
    core = ScriptedCore(says("héllo 😀!", tokens_per_event=tokens_per_event))
    admitted, text, token_ids, last = parts(generate(core, tmp_path, body(max_tokens=40, temperature=0)))
    assert admitted.prompt_tokens == 5
    assert text == "héllo 😀!"
    assert token_ids == (*ids_of(text), EOS_TOKEN_ID)
    assert last == Finished(reason=FinishReason.STOP, prompt_tokens=5, completion_tokens=len(token_ids))
    [request] = core.submitted
    assert request.prompt_token_ids == ids_of("hello")
    assert (request.max_new_tokens, request.sampling.temperature) == (40, 0)
    assert core.aborted == []


def test_every_piece_is_whole_characters(tmp_path: Path) -> None:
    events = generate(ScriptedCore(says("日本😀é")), tmp_path, body())
    texts = [event.text for event in events if isinstance(event, Delta)]
    assert all("\ufffd" not in text for text in texts), texts


def test_half_a_character_at_the_limit_becomes_a_replacement(tmp_path: Path) -> None:
    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        yield TokenEvent(ids_of("a😀")[:3])
        async for event in says("", reason=FinishReason.LENGTH)(_request):
            yield event

    _, text, _, last = parts(generate(ScriptedCore(play), tmp_path, body()))
    assert text == "a\ufffd"
    assert last == Finished(reason=FinishReason.LENGTH, prompt_tokens=5, completion_tokens=3)


@pytest.mark.parametrize("tokens_per_event", [1, 4, 100])
def test_a_stop_string_in_an_answer_that_is_still_too_short_is_text(tmp_path: Path, tokens_per_event: int) -> None:
    core = ScriptedCore(says("stop, or stop here", tokens_per_event=tokens_per_event))
    _, text, token_ids, last = parts(generate(core, tmp_path, body(stop=["stop"], min_tokens=6, max_tokens=40)))
    assert text == "stop, or "
    assert token_ids == ids_of("stop, or stop")
    assert last == Finished(reason=FinishReason.STOP, prompt_tokens=5, completion_tokens=13, stop_string="stop")


@pytest.mark.parametrize("tokens_per_event", [1, 4, 100])
def test_a_stop_string_ends_the_answer_and_is_not_shown(tmp_path: Path, tokens_per_event: int) -> None:
    core = ScriptedCore(says("one\nUser: two", tokens_per_event=tokens_per_event))
    _, text, token_ids, last = parts(generate(core, tmp_path, body(stop=["never", "\nUser:"])))
    assert text == "one"
    assert token_ids == ids_of("one\nUser:")
    assert last == Finished(reason=FinishReason.STOP, prompt_tokens=5, completion_tokens=9, stop_string="\nUser:")
    assert (core.aborted, core.abort_reasons) == (["r1"], [FinishReason.STOP]), (
        "it ended as it should, in the counters too"
    )


def test_what_only_began_like_a_stop_string_is_shown_at_the_end(tmp_path: Path) -> None:
    core = ScriptedCore(says("one EN", reason=FinishReason.LENGTH))
    _, text, _, last = parts(generate(core, tmp_path, body(stop=["END"])))
    assert (text, last.reason if isinstance(last, Finished) else last) == ("one EN", FinishReason.LENGTH)


def test_a_stop_token_with_text_of_its_own_counts_but_is_not_shown(tmp_path: Path) -> None:
    [stop_id] = ids_of("!")
    core = ScriptedCore(says("hey!", reason=FinishReason.LENGTH))
    _, text, token_ids, last = parts(generate(core, tmp_path, body(stop_token_ids=[stop_id])))
    assert (text, token_ids) == ("hey", ids_of("hey!"))
    assert isinstance(last, Finished)
    assert last.completion_tokens == 4
    assert core.submitted[0].stop_token_ids == {stop_id, EOS_TOKEN_ID}


def test_a_failure_in_the_middle_ends_the_stream_with_its_sentence(tmp_path: Path) -> None:
    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        yield TokenEvent(ids_of("par"))
        yield FailEvent("Stage 1 of the pipeline was lost.")

    _, text, _, last = parts(generate(ScriptedCore(play), tmp_path, body()))
    assert (text, last) == ("par", Failed(message="Stage 1 of the pipeline was lost."))


def test_a_token_that_breaks_its_way_to_text_ends_its_own_stream_alone(tmp_path: Path) -> None:
    """The core hands tokens over in its own turn: what goes wrong there is of no matter to it, nor to other streams."""
    broken = asyncio.Event()

    async def play(request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        yield TokenEvent(ids_of("par"))
        if request.request_id == "r1":
            yield TokenEvent((-1,))
            broken.set()
            yield TokenEvent(ids_of("never shown"))
        await broken.wait()
        yield TokenEvent(ids_of("!"))
        yield EndEvent(FinishReason.LENGTH)

    async def run() -> tuple[list[Any], list[Any]]:
        async with serve(core, tmp_path) as client:
            return await asyncio.gather(collect(client, body("r1")), collect(client, body("r2")))

    core = ScriptedCore(play)
    first, second = asyncio.run(run())
    _, text, _, last = parts(first)
    assert text == "par"
    assert last == Failed(message="The engine failed while it generated this answer; its log says why.")
    assert core.aborted == ["r1"]
    assert parts(second)[1] == "par!"
    assert isinstance(second[-1], Finished)


def test_what_a_core_says_after_the_end_changes_nothing(tmp_path: Path) -> None:
    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        yield TokenEvent(ids_of("par"))
        yield EndEvent(FinishReason.LENGTH)
        yield TokenEvent(ids_of("t"))
        yield FailEvent("It failed after all.")

    core = ScriptedCore(play)
    _, text, _, last = parts(generate(core, tmp_path, body()))
    assert text == "par"
    assert last == Finished(reason=FinishReason.LENGTH, prompt_tokens=5, completion_tokens=3)
    assert core.aborted == []


def test_the_first_lines_arrive_while_the_rest_is_being_made(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        yield TokenEvent(ids_of("a"))
        await more.wait()
        async for event in says("b")(_request):
            yield event

    async def run() -> None:
        async with (
            serve(ScriptedCore(play), tmp_path) as client,
            client.stream("POST", "/v1/generate", json=body()) as response,
        ):
            lines = response.aiter_lines()
            assert isinstance(EVENT.decode(await anext(lines)), Admitted)
            assert EVENT.decode(await anext(lines)) == Delta(text="a", token_ids=ids_of("a"))
            more.set()
            assert [EVENT.decode(line) async for line in lines][-1].completion_tokens == 3

    asyncio.run(run())


@pytest.mark.parametrize("script", [says_forever, says_nothing], ids=["generating", "queued"])
def test_a_client_that_leaves_aborts_its_request_alone(tmp_path: Path, script: Any) -> None:
    async def run() -> None:
        core = ScriptedCore(script)
        async with serve(core, tmp_path) as client:
            async with (
                client.stream("POST", "/v1/generate", json=body("stays")) as stays,
                client.stream("POST", "/v1/generate", json=body("leaves")) as leaves,
            ):
                lines = leaves.aiter_lines(), stays.aiter_lines()
                await anext(lines[0])
                await leaves.aclose()
                await until(lambda: core.aborted == ["leaves"], f"an abort of one: {core.aborted}")
                await anext(lines[1])
            await until(lambda: core.aborted == ["leaves", "stays"], f"an abort of both: {core.aborted}")

    asyncio.run(run())


def test_an_id_may_be_used_again_when_its_request_has_ended_but_not_before(tmp_path: Path) -> None:
    async def run() -> None:
        core = ScriptedCore(says_nothing)
        async with serve(core, tmp_path) as client:
            async with client.stream("POST", "/v1/generate", json=body()) as first:
                lines = first.aiter_lines()  # without a name for it the stream would be closed at once
                await anext(lines)
                second = await client.post("/v1/generate", json=body())
                assert (second.status_code, second.json()["param"]) == (400, "request_id")
            await until(lambda: core.aborted == ["r1"], "an abort")
            core.script = says("again")
            # Its core knows before the last of the first answer is gone.
            deadline = time.monotonic() + 60
            while (again := await client.post("/v1/generate", json=body())).status_code != 200:
                assert (again.status_code, again.json()["param"]) == (400, "request_id")
                assert time.monotonic() < deadline, "the id stayed in use"
            assert parts([EVENT.decode(line) for line in again.text.splitlines()])[1] == "again"

    asyncio.run(run())


def test_a_long_wait_for_a_slot_is_no_silence_while_the_group_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blank line for each look that finds steps begun since the last one, and none once the group stands still."""
    monkeypatch.setattr(answer_lines, "QUEUED_WORD_SECONDS", 0.01)
    has_slot = asyncio.Event()

    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        await has_slot.wait()
        async for event in says("a")(_request):
            yield event

    async def run() -> list[str]:
        core = ScriptedCore(play, steps=0)
        async with (
            serve(core, tmp_path) as client,
            client.stream("POST", "/v1/generate", json=body()) as response,
        ):
            lines = response.aiter_lines()
            assert isinstance(EVENT.decode(await anext(lines)), Admitted)
            await until(lambda: core.times_asked_for_steps >= 1, "it looks after the request", 60)
            for steps in (1, 2, 3):
                core.steps = steps
                assert await anext(lines) == ""
            for still in (3, None):
                core.steps, core.times_asked_for_steps = still, 0
                await until(lambda: core.times_asked_for_steps >= 5, "it goes on looking", 60)
            has_slot.set()
            return [line async for line in lines]

    rest = asyncio.run(run())
    assert all(rest), rest
    assert isinstance(EVENT.decode(rest[-1]), Finished)


def dechunked(content: bytes) -> bytes:
    """The body within chunks."""
    body = b""
    while size := int((head := content.partition(b"\r\n")[0]), 16):
        body += content[len(head) + 2 : len(head) + 2 + size]
        content = content[len(head) + 2 + size + 2 :]
    return body


def test_a_client_that_stops_reading_gets_tokens_merged_and_loses_none(tmp_path: Path) -> None:
    count = 20_000

    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        for _ in range(count):
            await asyncio.sleep(0)
            yield TokenEvent(ids_of("x"))
        finished.set()
        async for event in says("", reason=FinishReason.LENGTH)(_request):
            yield event

    finished = asyncio.Event()

    async def run() -> bytes:
        async with serve(ScriptedCore(play), tmp_path) as client:
            url = client.base_url
            with socket.socket() as raw:
                # A small window makes the server's socket full long before the answer is complete.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                raw.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(raw, (url.host, url.port))
                payload = json.dumps(body()).encode()
                head = f"POST /v1/generate HTTP/1.0\r\nContent-Length: {len(payload)}\r\n\r\n"
                await loop.sock_sendall(raw, head.encode() + payload)
                await finished.wait()
                received = b""
                while chunk := await loop.sock_recv(raw, 1 << 16):
                    received += chunk
                return received

    head, _, content = asyncio.run(run()).partition(b"\r\n\r\n")
    assert b"200 OK" in head, head
    if b"chunked" in head.lower():  # one of uvicorn's two HTTP parsers answers HTTP/1.0 so
        content = dechunked(content)
    events = [EVENT.decode(line) for line in content.splitlines()]
    _, text, token_ids, last = parts(events)
    assert (text, len(token_ids)) == ("x" * count, count)
    assert last == Finished(reason=FinishReason.LENGTH, prompt_tokens=5, completion_tokens=count)
    largest = max(len(event.token_ids) for event in events if isinstance(event, Delta))
    assert largest > 1000, f"the largest delta holds {largest} tokens"


def test_log_probabilities_that_waited_come_in_lines_that_a_gateway_takes(tmp_path: Path) -> None:
    """As they wait for a client that reads slowly: in one line they were longer than who reads lines allows."""
    text = "abcd" * 1500
    alternatives = tuple((index, -1.2345678901234567 - index) for index in range(20))

    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        ids = (*ids_of(text), EOS_TOKEN_ID)
        yield TokenEvent(ids, logprobs=tuple(TokenLogprobs(-0.5 - at, alternatives) for at in range(len(ids))))
        yield EndEvent(FinishReason.STOP)

    async def run() -> list[str]:
        request = body(top_logprobs=20)
        async with (
            serve(ScriptedCore(play), tmp_path) as client,
            client.stream("POST", "/v1/generate", json=request) as response,
        ):
            return [line async for line in response.aiter_lines()]

    lines = asyncio.run(run())
    events = [EVENT.decode(line) for line in lines]
    _, told, token_ids, _ = parts(events)
    assert (told, token_ids) == (text, (*ids_of(text), EOS_TOKEN_ID))
    deltas = [event for event in events if isinstance(event, Delta)]
    logprobs = [one for delta in deltas for one in delta.logprobs]
    assert [(one.token_id, one.logprob) for one in logprobs] == [(i, -0.5 - at) for at, i in enumerate(ids_of(text))]
    for delta in deltas:
        assert [one.token_id for one in delta.logprobs] == list(delta.token_ids)[: len(delta.logprobs)]
    assert sum(map(len, lines)) > 4 * max(map(len, lines)), "one line holds most of it"
    assert max(map(len, lines)) < LINE_LIMIT_BYTES / 4


def test_a_long_prompt_does_not_hold_up_another_stream(tmp_path: Path) -> None:
    """While one long text is tokenized, a stream that started before goes on to its end."""

    async def run() -> tuple[list[Any], list[Any]]:
        async with serve(ScriptedCore(says("short answer")), tmp_path) as client:
            long = {"request_id": "long", "prompt": {"kind": "text", "text": "word " * 11_000}}
            return await asyncio.gather(collect(client, long), collect(client, body("short")))

    long, short = asyncio.run(run())
    assert long[0].prompt_tokens == 55_000
    assert parts(short)[1] == parts(long)[1] == "short answer"


def test_a_chat_is_rendered_with_the_models_template(tmp_path: Path) -> None:
    core = ScriptedCore(says("ok"))
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    request = {"request_id": "r1", "prompt": {"kind": "chat", "messages": messages}}
    assert parts(generate(core, tmp_path, request))[1] == "ok"
    assert core.submitted[0].prompt_token_ids == ids_of("abc")
