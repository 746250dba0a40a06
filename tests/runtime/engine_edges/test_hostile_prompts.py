"""Prompts that are dear to read: refused by their length first, and never in the way of another one."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from oracles.tokenizer_models import write_byte_level
from stageline_api.engine_http import MAX_MESSAGES, ChatMessage, ChatPrompt, ErrorCode, Prompt, TextPrompt
from stageline_runtime.engine.edge.generation import LARGE, ReadingThreads
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.prompts import MOST_CHARACTERS_A_TOKEN, PromptReader

CONTEXT = 8192
DIGITS = "7" * (4 * 1024 * 1024)
"""One word for most tokenizers: some take a quarter of a minute for it."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LONGEST = CONTEXT * MOST_CHARACTERS_A_TOKEN


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
    assert (refused.value.code, refused.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, param)
    assert f"takes {LONGEST} at most" in refused.value.message
    assert spent < 0.5, f"{spent:.3f} s of CPU"


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
