"""An assistant's turn that comes back reaches the template whole: calls beside no content, and thoughts."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from oracles.tokenizer_models import write_byte_level
from stageline_api.engine_http import ChatMessage, ChatPrompt, GenerateRequest, SamplingParams, ToolCall
from stageline_runtime.engine.text.prompts import PromptReader

CALLS = "{% for call in message.tool_calls %}<call>{{ call.function.name }}{% endfor %}"
AS_DEEPSEEK_R1 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
    + CALLS
    + "{% elif message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1] }}<end>"
    "{% else %}{{ message['content'] }}|{% endif %}{% endfor %}"
)
ONLY_WITHOUT_THE_KEY = (
    "{% for message in messages %}{% if 'content' in message %}{{ message.content }}|{% else %}"
    + CALLS
    + "{% endif %}{% endfor %}"
)
NULL_BY_NEGATION = (
    "{% for message in messages %}{% if message.content is not none %}{{ message.content }}|{% else %}"
    + CALLS
    + "{% endif %}{% endfor %}"
)
WRITES_WHAT_IT_GETS = "{% for message in messages %}{{ message.content }}|" + CALLS + "{% endfor %}"
CALLS_FIRST = (
    "{% for message in messages %}{% if message.tool_calls %}" + CALLS + "{% else %}{{ message.content }}|{% endif %}"
    "{% endfor %}"
)
NEEDS_TEXT = "{% for message in messages %}{{ message.content + '|' }}" + CALLS + "{% endfor %}"
READS_NO_CALLS = "{% for message in messages %}{{ message.content }}|{% endfor %}"
TURNS = (
    ChatMessage(role="user", content="Rain?"),
    ChatMessage(
        role="assistant",
        content="",
        is_content_null=True,
        tool_calls=(ToolCall(id="c1", name="weather", arguments={"at": "Oslo"}),),
    ),
    ChatMessage(role="tool", content="wet", tool_call_id="c1"),
)


def reader(directory: Path, template: str) -> PromptReader:
    write_byte_level(directory, chat_template=template)
    return PromptReader.load(directory, vocab_size=260, max_model_len=4096, eos_token_ids=[1])


def rendered(made: PromptReader, turns: tuple[ChatMessage, ...]) -> str:
    return made.tokenizer.decode(made.render_prompt(ChatPrompt(messages=turns)), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (AS_DEEPSEEK_R1, "Rain?|<call>weatherwet|"),
        (ONLY_WITHOUT_THE_KEY, "Rain?|<call>weatherwet|"),
        (NULL_BY_NEGATION, "Rain?|<call>weatherwet|"),
        (WRITES_WHAT_IT_GETS, "Rain?||<call>weatherwet|"),
        (CALLS_FIRST, "Rain?|<call>weatherwet|"),
        (NEEDS_TEXT, "Rain?||<call>weatherwet|"),
        (READS_NO_CALLS, "Rain?||wet|"),
    ],
    ids=["r1", "key", "negation", "writes", "calls first", "needs text", "no calls"],
)
def test_calls_beside_null_are_shown_in_whatever_way_the_template_asks_for_it(
    template: str, expected: str, tmp_path: Path
) -> None:
    made = reader(tmp_path, template)
    assert rendered(made, TURNS) == expected
    # A second time, by what the first has shown; and a chat without calls is as ever.
    assert rendered(made, TURNS) == expected
    assert rendered(made, TURNS[:1]) == "Rain?|"


def test_a_chat_is_rendered_as_alone_whatever_others_showed_before(tmp_path: Path) -> None:
    """The way that shows one chat's calls fails on a chat whose words the template joins."""
    template = (
        "{% for message in messages %}{% if messages|length == 1 %}{{ message.content + '|' }}"
        "{% elif 'content' in message %}{{ message.content }}|{% endif %}" + CALLS + "{% endfor %}"
    )
    alone = (TURNS[1],)
    expected = rendered(reader(tmp_path, template), alone)
    made = reader(tmp_path, template.replace("'content' in message", "message.content is defined"))
    rendered(made, TURNS)
    assert rendered(made, alone) == expected == "|<call>weather"


def test_thoughts_that_no_template_shows_count_for_no_context(tmp_path: Path) -> None:
    made = reader(tmp_path, READS_NO_CALLS)
    thought = ChatMessage(role="assistant", content="Wet.", reasoning="x" * 100_000)
    assert rendered(made, (TURNS[0], thought)) == "Rain?|Wet.|"


def test_content_that_is_an_empty_text_stays_one(tmp_path: Path) -> None:
    made = reader(tmp_path, ONLY_WITHOUT_THE_KEY)
    said = structs.replace(TURNS[1], is_content_null=False)
    assert rendered(made, (TURNS[0], said)) == "Rain?||"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_the_template_under_the_name_that_it_reads(name: str, tmp_path: Path) -> None:
    source = (
        "{% for message in messages %}{% if message." + name + " is defined %}<think>{{ message." + name + " }}</think>"
        "{% endif %}{{ message.content }}|{% endfor %}"
    )
    made = reader(tmp_path, source)
    thinking = ChatMessage(role="assistant", content="4", reasoning="Two and two.")
    assert rendered(made, (TURNS[0], thinking)) == "Rain?|<think>Two and two.</think>4|"
    assert made.read(ask((TURNS[0], thinking))).ignored == ()


def test_thoughts_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = (
        "{% for message in messages %}{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>"
        "{% endif %}{{ message.content }}|{% endfor %}"
    )
    made = reader(tmp_path, source)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "reasoning_content": "Hm."}]
    ours = tuple(
        ChatMessage(role=turn["role"], content=turn["content"], reasoning=turn.get("reasoning_content"))
        for turn in turns
    )
    assert rendered(made, ours) == tokenizer.apply_chat_template(turns, tokenize=False)


def test_thoughts_that_the_template_does_not_read_are_named_as_ignored(tmp_path: Path) -> None:
    thinking = ChatMessage(role="assistant", content="4", reasoning="Two and two.")
    made = reader(tmp_path, CALLS_FIRST + "{% if enable_thinking %}{% endif %}")
    assert made.read(ask((TURNS[0], thinking))).ignored == ("messages.reasoning_content",)


def ask(turns: tuple[ChatMessage, ...]) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt=ChatPrompt(messages=turns), sampling=SamplingParams())
