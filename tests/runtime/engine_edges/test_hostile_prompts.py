"""Prompts that are dear to read: refused by their length first, and never in the way of another one."""

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from oracles.tokenizer_models import write_byte_level
from processes.cpu_bounds import CpuBound
from processes.scripted_core_server import ScriptedCore, says, serve
from stageline_api.engine_http import (
    MAX_MESSAGES,
    ChatMessage,
    ChatPrompt,
    ErrorCode,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    ToolCall,
    ToolFunction,
    UnreadableError,
)
from stageline_runtime.engine.edge.generation import LARGE, Generation, ReadingThreads
from stageline_runtime.engine.edge.routes import MAX_BODY_BYTES
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.chat_template import ChatTemplate
from stageline_runtime.engine.text.prompt_size import work_of
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
    "texts for ids": (lambda: asking(IDS % b",".join([b'"x"'] * 1_000_000)), "prompt.token_ids[0]: "),
    "numbers for messages": (lambda: asking_chat(*[b"1"] * 2_000_000), "prompt.messages[0]: "),
    "one stop string": (lambda: asking(SMALL, b'{"stop":["%s"]}' % DIGITS.encode()), "at most 256 are allowed"),
    "digits": (lambda: asking(TEXT % DIGITS.encode()), "4194304 characters"),
    "digits in a chat": (lambda: asking_chat(USER % DIGITS.encode()), "4194304 characters"),
    "digits that are few enough": (lambda: asking(TEXT % (b"7" * 900_000)), "900000 tokens"),
    "140,000 messages": (lambda: asking_chat(*[USER % b""] * 140_000), "length <= 8192"),
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
    reader: PromptReader, prompt: Prompt, param: str, cpu_bound: CpuBound
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
    assert cpu_bound.holds(spent, LOOP_SECONDS), f"{spent:.3f} s of CPU"
    assert most_bytes < 256 * 1024, f"{most_bytes} bytes for {len(DIGITS)} characters"


@pytest.mark.parametrize("name", AT_THE_DOOR)
def test_what_is_refused_at_the_door_has_the_loop_for_a_moment(tmp_path: Path, name: str, cpu_bound: CpuBound) -> None:
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
            while not spent or not cpu_bound.holds(min(spent), LOOP_SECONDS):
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
    ChatPrompt.from_json(ChatPrompt(messages=(message,) * MAX_MESSAGES).to_json())
    with pytest.raises(UnreadableError, match="<= 8192"):
        ChatPrompt.from_json(ChatPrompt(messages=(message,) * (MAX_MESSAGES + 1)).to_json())


def nested(value: object, depth: int) -> object:
    for _ in range(depth):
        value = [value]
    return value


def with_tool(parameters: object) -> ChatPrompt:
    tool = ToolFunction(name="f", description="d", parameters={"a": parameters})
    return ChatPrompt(messages=(ChatMessage(role="user", content="x"),), tools=(tool,))


def with_call(arguments: Any, name: str = "f") -> ChatPrompt:
    call = ToolCall(id="1", name=name, arguments=arguments)
    return ChatPrompt(messages=(ChatMessage(role="assistant", content="", tool_calls=(call,)),))


EXPENSIVE: Final[dict[str, ChatPrompt]] = {
    "numbers of a tool": with_tool([1] * 5_000),
    "few numbers of a tool, deep": with_tool(nested([1] * 200, 150)),
    "a long name in a tool": with_tool({"x" * 70_000: 1}),
    "a long description": with_tool({"description": "x" * 70_000}),
    "arguments of a call": with_call({"a": [1] * 5_000}),
    "arguments of a call as a text": with_call('{"a": [' + "1," * 2_000 + "1]}"),
    "long names of calls": ChatPrompt(messages=with_call({}, name="f" * 128).messages * 400),
    "what the assistant thought": ChatPrompt(
        messages=(ChatMessage(role="assistant", content="", reasoning="x" * 70_000),)
    ),
    "many small calls": ChatPrompt(messages=with_call({}).messages * 4_000),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_a_template_writes_beside_messages_counts_for_a_chats_size(name: str) -> None:
    assert work_of(EXPENSIVE[name], LARGE) > LARGE
    assert work_of(with_tool({"type": "object", "properties": {"a": {"type": "string"}}}), LARGE) < LARGE // 50


def test_counting_stops_where_a_prompt_is_known_to_be_large() -> None:
    class Counted(list[int]):
        read = 0

        def __iter__(self) -> Iterator[int]:
            for each in super().__iter__():
                Counted.read += 1
                yield each

    prompt = with_tool(1)
    prompt.tools[0].parameters["a"] = Counted([1] * 1_000_000)
    assert work_of(prompt, LARGE) > LARGE
    assert Counted.read < 10_000


def test_tools_that_no_context_holds_are_refused_before_they_are_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_level(tmp_path, chat_template="<tool_call>{{ tools | tojson(indent=4) }}" + TEMPLATE)
    reader = PromptReader.load(tmp_path, vocab_size=260, max_model_len=CONTEXT, eos_token_ids=[1])
    monkeypatch.setattr(ChatTemplate, "render", lambda *_: pytest.fail("it was rendered"))
    with pytest.raises(PromptError, match=f"takes {LONGEST} at most"):
        reader.render_prompt(with_tool(nested([1] * 300_000, 150)))


def test_a_chat_of_many_tools_keeps_no_other_chat_from_its_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_level(tmp_path, chat_template="<tool_call>{{ tools | tojson(indent=4) }}" + TEMPLATE)
    reader = PromptReader.load(tmp_path, vocab_size=260, max_model_len=CONTEXT, eos_token_ids=[1])
    begun, going = threading.Event(), threading.Event()
    render = ChatTemplate.render

    def waiting(self: ChatTemplate, messages: Any, tools: Any = (), *rest: Any) -> str:
        if tools:
            begun.set()
            going.wait()
        return render(self, messages, tools, *rest)

    monkeypatch.setattr(ChatTemplate, "render", waiting)

    async def no_guide(_: str) -> None:
        pytest.fail("no guide is asked for")

    def asking_for(prompt: ChatPrompt, request_id: str) -> GenerateRequest:
        return GenerateRequest(request_id=request_id, prompt=prompt, sampling=SamplingParams(max_tokens=1))

    async def run() -> None:
        core = ScriptedCore(script=says("never"))
        generation = Generation(core, reader, no_guide, ReadingThreads())
        large = asyncio.create_task(generation.read(asking_for(with_tool([1] * 5_000), "large")))
        try:
            assert await asyncio.to_thread(begun.wait, 60)
            async with asyncio.timeout(60):
                small = await generation.read(asking_for(chat("hi"), "small"))
            assert small[0].prompt_token_ids
            assert not large.done()
        finally:
            going.set()
            await asyncio.gather(large, return_exceptions=True)

    asyncio.run(run())


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
