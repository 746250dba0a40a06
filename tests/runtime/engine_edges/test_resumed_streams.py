"""A stream that goes on at another engine, cut after every token: the two parts together are the undisturbed stream."""

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from processes.scripted_core_server import EOS_TOKEN_ID, ScriptedCore, ids_of, serve
from stageline_api.engine_http import Admitted, Delta, Event, Finished, FinishReason
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, EndEvent, TokenEvent
from stageline_runtime.engine.text.output_text import OutputText
from stageline_runtime.engine.text.tokenizer import EngineTokenizer

EVENT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)
PROMPT = {"kind": "text", "text": "hello"}


def goes_on(token_ids: tuple[int, ...], reason: FinishReason) -> ScriptedCore:
    """A core that generates `token_ids`, from where the request's generated ones end."""

    async def play(request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        done = len(request.generated_token_ids)
        assert request.generated_token_ids == token_ids[:done]
        for token in token_ids[done:]:
            await asyncio.sleep(0)
            yield TokenEvent((token,))
        yield EndEvent(reason)

    return ScriptedCore(play)


async def collect(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    async with client.stream("POST", "/v1/generate", json={"request_id": "r", "prompt": PROMPT} | fields) as response:
        assert response.status_code == 200, await response.aread()
        return [EVENT.decode(line) async for line in response.aiter_lines()]


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def ids_in(events: list[Any]) -> tuple[int, ...]:
    return sum((event.token_ids for event in events if isinstance(event, Delta)), ())


@pytest.mark.parametrize(
    ("said", "sampling", "reason", "stop_string"),
    [
        pytest.param("héllo 😀 日本!", {}, FinishReason.STOP, None, id="split-characters"),
        pytest.param("héllo 😀", {"max_tokens": 11}, FinishReason.LENGTH, None, id="length"),
        pytest.param("abc END of", {"stop": ["END"]}, FinishReason.STOP, "END", id="stop-string"),
        pytest.param("xEEN ENDE😀END", {"stop": ["END!", "E😀"]}, FinishReason.STOP, "E😀", id="held-back-often"),
        pytest.param(
            "some EN", {"stop": ["END"], "max_tokens": 7}, FinishReason.LENGTH, None, id="held-back-at-the-end"
        ),
    ],
)
def test_cut_after_every_token(
    tmp_path: Path, said: str, sampling: dict[str, Any], reason: FinishReason, stop_string: str | None
) -> None:
    token_ids = ids_of(said) + ((EOS_TOKEN_ID,) if reason is FinishReason.STOP else ())
    core = goes_on(token_ids, reason)

    async def run() -> None:
        async with serve(core, tmp_path) as client:
            whole = await collect(client, sampling=sampling)
            text, ids = text_of(whole), ids_in(whole)
            assert (whole[-1].reason, whole[-1].stop_string) == (reason, stop_string)
            for cut in range(len(ids) + 1):
                relayed = released_after(core.submitted[0], tmp_path, ids[:cut])
                # No count: what the engine sent with these ids. With one: more of it was seen, or nothing at all.
                for characters in (None, len(relayed), len(text) if cut == len(ids) else 0):
                    given = {"generated_token_ids": ids[:cut], "generated_characters": characters if cut else None}
                    first, *deltas, last = await collect(client, sampling=sampling, **given)
                    seen = relayed if characters is None else text[:characters]
                    assert isinstance(first, Admitted)
                    assert seen + text_of(deltas) == text, f"after {ids[:cut]}, {characters}: {deltas}"
                    assert ids[:cut] + ids_in(deltas) == ids
                    assert last == whole[-1], f"after {cut}: {last}"

    asyncio.run(run())


def released_after(request: AdmittedRequest, model_dir: Path, token_ids: tuple[int, ...]) -> str:
    """The text of all deltas up to the last of these ids."""
    output = OutputText(EngineTokenizer.load(model_dir), request)
    return "".join(output.push((token,)).text for token in token_ids)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        pytest.param({"generated_token_ids": [260]}, "generated_token_ids", "id 260", id="over-vocabulary"),
        pytest.param(
            {"generated_token_ids": [5, 6, 7], "sampling": {"max_tokens": 2}},
            "generated_token_ids",
            "3 generated_token_ids .* is 2",
            id="over-max-tokens",
        ),
        pytest.param({"generated_token_ids": [EOS_TOKEN_ID, 5]}, "generated_token_ids", "after 1", id="after-the-end"),
        pytest.param(
            {"generated_token_ids": ids_of("aSTOPb"), "sampling": {"stop": ["STOP"]}},
            "generated_token_ids",
            "at the 5th",
            id="after-a-stop-string",
        ),
        pytest.param({"generated_characters": 3}, "generated_characters", "is 3", id="characters-of-nothing"),
        pytest.param({"priority": 1001}, "priority", "1000", id="priority"),
    ],
)
def test_what_cannot_be_continued_is_refused(tmp_path: Path, fields: dict[str, Any], param: str, words: str) -> None:
    async def run() -> httpx.Response:
        async with serve(goes_on((), FinishReason.STOP), tmp_path) as client:
            return await client.post("/v1/generate", json={"request_id": "r", "prompt": PROMPT} | fields)

    response = asyncio.run(run())
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["param"] == param
    assert re.search(words, error["message"]), error


def test_an_answer_that_has_ended_needs_no_core(tmp_path: Path) -> None:
    core = goes_on(ids_of("ab"), FinishReason.STOP)
    done = (*ids_of("ab"), EOS_TOKEN_ID)

    async def run() -> list[Any]:
        async with serve(core, tmp_path) as client:
            return await collect(client, generated_token_ids=done)

    assert asyncio.run(run()) == [
        Admitted(prompt_tokens=5),
        Finished(reason=FinishReason.STOP, prompt_tokens=5, completion_tokens=3),
    ]
    assert not core.submitted
    assert not core.aborted
