"""Prompts that are dear to read: refused by their length first, and never in the way of another one."""

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
import pytest
from pydantic import ValidationError

from oracles.tokenizer_models import write_byte_level
from processes.scripted_core_server import ScriptedCore, says, serve
from stageline_api.engine_http import MAX_MESSAGES, ChatMessage, ChatPrompt, ErrorCode, Prompt, TextPrompt
from stageline_runtime.engine.edge.generation import LARGE, ReadingThreads
from stageline_runtime.engine.edge.routes import MAX_BODY_BYTES
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.prompts import MOST_CHARACTERS_A_TOKEN, PromptReader

CONTEXT = 8192
DIGITS = "7" * (4 * 1024 * 1024)
"""One word for most tokenizers: some take a quarter of a minute for it."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LONGEST = CONTEXT * MOST_CHARACTERS_A_TOKEN
LOOP_SECONDS = 0.05
"""Of CPU, for which anybody's request may keep the others waiting."""
MOST_BYTES = 96 * 1024 * 1024
TRIES = 3


def asking(prompt: bytes, sampling: bytes = b"{}") -> bytes:
    return b'{"request_id":"r","prompt":%s,"sampling":%s}' % (prompt, sampling)


def asking_chat(*messages: bytes) -> bytes:
    return asking(b'{"kind":"chat","messages":[%s]}' % b",".join(messages))


SMALL: Final = b'{"kind":"text","text":"x"}'
TEXT: Final = b'{"kind":"text","text":"%s"}'
IDS: Final = b'{"kind":"tokens","token_ids":[%s]}'
USER: Final = b'{"role":"user","content":"%s"}'
AT_THE_DOOR: Final[dict[str, tuple[Callable[[], bytes], str]]] = {
    "texts for ids": (lambda: asking(IDS % b",".join([b'"x"'] * 1_000_000)), "prompt.token_ids.0: "),
    "numbers for messages": (lambda: asking_chat(*[b"1"] * 2_000_000), "prompt.messages.0: "),
    "one stop string": (lambda: asking(SMALL, b'{"stop":["%s"]}' % DIGITS.encode()), "at most 256 are allowed"),
    "digits": (lambda: asking(TEXT % DIGITS.encode()), "4194304 characters"),
    "digits in a chat": (lambda: asking_chat(USER % DIGITS.encode()), "4194304 characters"),
    "digits that are few enough": (lambda: asking(TEXT % (b"7" * 900_000)), "900000 tokens"),
    "140,000 messages": (lambda: asking_chat(*[USER % b""] * 140_000), "at most 8192 items"),
    "messages that are few enough": (lambda: asking_chat(*[USER % (b"7" * 100)] * MAX_MESSAGES), "819200 tokens"),
}
"""What an engine's port is asked that is dear to check or to read, and what it says to it."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    directory = tmp_path_factory.mktemp("model")
    write_byte_level(directory, chat_template=TEMPLATE)
    return PromptReader.load(directory, vocab_size=260, max_model_len=CONTEXT, eos_token_ids=[1])


def chat(*contents: str) -> ChatPrompt:
    return ChatPrompt(messages=tuple(ChatMessage(role="user", content=content) for content in contents))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        pytest.param(TextPrompt(text=DIGITS), "prompt", id="digits"),
        pytest.param(chat(DIGITS), "messages", id="digits-in-a-chat"),
        pytest.param(chat(*["x" * (LONGEST // 100)] * 101), "messages", id="many-messages"),
    ],
)
def test_a_prompt_that_no_context_holds_is_refused_by_its_characters(
    reader: PromptReader, prompt: Prompt, param: str
) -> None:
    began = time.thread_time()
    with pytest.raises(PromptError) as refused:
        reader.render_prompt(prompt)
    spent = time.thread_time() - began
    tracemalloc.start()
    try:
        with pytest.raises(PromptError):
            reader.render_prompt(prompt)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (refused.value.code, refused.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, param)
    assert f"takes {LONGEST} at most" in refused.value.message
    assert spent < LOOP_SECONDS, f"{spent:.3f} s of CPU"
    assert most_bytes < 256 * 1024, f"{most_bytes} bytes for {len(DIGITS)} characters"


@pytest.mark.parametrize("name", AT_THE_DOOR)
def test_what_is_refused_at_the_door_has_the_loop_for_a_moment(tmp_path: Path, name: str) -> None:
    """Whether it is refused by its form, by its length or by its tokens: the rest is not done in the loop."""
    body, words = AT_THE_DOOR[name][0](), AT_THE_DOOR[name][1]
    core, spent = ScriptedCore(script=says("never")), list[float]()

    async def refusal(client: httpx.AsyncClient) -> str:
        """By a client in another thread."""
        url = client.base_url.join("/v1/generate")
        answer = await asyncio.to_thread(httpx.post, url, content=body, trust_env=False, timeout=60, verify=False)
        return answer.text

    async def run() -> int:
        async with serve(core, tmp_path, max_body_bytes=MAX_BODY_BYTES) as client:
            # Of several tries the least counts: Python collects its garbage in whatever thread it comes to.
            while not spent or min(spent) >= LOOP_SECONDS:
                assert len(spent) < TRIES, f"{spent} s of the loop for {len(body)} bytes"
                began = time.thread_time()
                said = await refusal(client)
                spent.append(time.thread_time() - began)
                assert words in said, said[:300]
            tracemalloc.start()
            await refusal(client)
            return tracemalloc.get_traced_memory()[1]

    try:
        most_bytes = asyncio.run(run())
    finally:
        tracemalloc.stop()
    assert most_bytes < MOST_BYTES, f"{most_bytes} bytes for {len(body)}"
    assert core.submitted == []


def test_a_template_that_writes_more_than_it_was_given_is_held_to_the_same(tmp_path: Path) -> None:
    write_byte_level(tmp_path, chat_template="{% for a in range(9000) %}{{ 'x' * 100 }}{% endfor %}")
    reader = PromptReader.load(tmp_path, vocab_size=260, max_model_len=CONTEXT, eos_token_ids=[1])
    with pytest.raises(PromptError, match="900000 characters"):
        reader.render_prompt(chat("x"))


def test_a_chat_has_no_more_messages_than_a_template_may_run_over() -> None:
    message = ChatMessage(role="user", content="")
    ChatPrompt(messages=(message,) * MAX_MESSAGES)
    with pytest.raises(ValidationError, match="at most 8192"):
        ChatPrompt(messages=(message,) * (MAX_MESSAGES + 1))


def test_large_prompts_wait_for_each_other_and_small_ones_for_none() -> None:
    async def run() -> None:
        threads, going = ReadingThreads(), threading.Event()
        large = [asyncio.create_task(threads.run(LARGE + 1, going.wait)) for _ in range(100)]
        for _ in range(20):
            async with asyncio.timeout(60):
                assert await threads.run(LARGE, lambda: "read") == "read"
        assert not any(one.done() for one in large)
        going.set()
        assert all(await asyncio.gather(*large))

    asyncio.run(run())
