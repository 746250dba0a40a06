"""A prompt that several choices ask with is rendered and tokenized once."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from oracles.tokenizer_models import write_byte_level
from stageline_api.engine_http import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    ToolCall,
    ToolFunction,
)
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text import recent_prompts
from stageline_runtime.engine.text.chat_template import ChatTemplate
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.engine.text.recent_prompts import RecentPrompts, written
from stageline_runtime.engine.text.tokenizer import EngineTokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}<tool_call><think></think>"
CHOICES = 16
TEXT = TextPrompt(text="hello " * 50)


def chat(content: str, description: str = "d") -> ChatPrompt:
    tool = ToolFunction(name="f", description=description, parameters={"type": "object"})
    return ChatPrompt(messages=(ChatMessage(role="user", content=content),), tools=(tool,))


class Counts:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded = self.rendered = 0
        encode, render = EngineTokenizer.encode, ChatTemplate.render

        def encoding(tokenizer: EngineTokenizer, *given: Any, **named: Any) -> tuple[int, ...]:
            self.encoded += 1
            return encode(tokenizer, *given, **named)

        def rendering(template: ChatTemplate, *given: Any, **named: Any) -> str:
            self.rendered += 1
            return render(template, *given, **named)

        monkeypatch.setattr(EngineTokenizer, "encode", encoding)
        monkeypatch.setattr(ChatTemplate, "render", rendering)


@pytest.fixture
def reader(tmp_path: Path) -> PromptReader:
    write_byte_level(tmp_path, chat_template=TEMPLATE)
    return PromptReader.load(tmp_path, vocab_size=260, max_model_len=4096, eos_token_ids=[1])


@pytest.fixture
def counts(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> Counts:  # noqa: ARG001 - loading encodes too
    return Counts(monkeypatch)


def choices(prompt: Prompt) -> list[GenerateRequest]:
    """As they come: each is parsed by itself and has a seed of its own."""
    one = GenerateRequest(request_id="r", prompt=prompt)
    told = [
        structs.replace(one, request_id=f"r{choice}", sampling=SamplingParams(seed=choice, max_tokens=1))
        for choice in range(CHOICES)
    ]
    return [GenerateRequest.from_json(each.to_json()) for each in told]


@pytest.mark.parametrize("prompt", [TEXT, chat("hello")], ids=["text", "chat"])
def test_choices_of_a_request_are_tokenized_once(reader: PromptReader, counts: Counts, prompt: Prompt) -> None:
    read = [reader.read(each) for each in choices(prompt)]
    assert counts.encoded == 1
    assert len({each.prompt_token_ids for each in read}) == 1
    assert len({each.thoughts for each in read}) == 1
    assert [each.sampling.seed for each in read] == list(range(CHOICES))
    rendered = counts.rendered
    reader.read(choices(prompt)[0])
    assert counts.rendered == rendered


def test_prompts_that_differ_anywhere_are_told_apart(reader: PromptReader, counts: Counts) -> None:
    prompts: list[Prompt] = [TEXT, TextPrompt(text=TEXT.text + "!"), chat("hello"), chat("hello", "another")]
    read = [reader.read(choices(each)[0]).prompt_token_ids for each in prompts]
    assert len(set(read)) == len(prompts) == counts.encoded
    assert [reader.render_prompt(each) for each in prompts] == read


def test_nothing_is_kept_for_long(reader: PromptReader, counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.read(choices(TEXT)[0])
    monkeypatch.setattr(recent_prompts, "KEPT_SECONDS", -1.0)
    reader.read(choices(TEXT)[0])
    assert counts.encoded == 2


def test_a_refused_prompt_is_refused_each_time(reader: PromptReader) -> None:
    for each in choices(TextPrompt(text="x" * 5000))[:2]:
        with pytest.raises(PromptError, match=r"5000 tokens|5001 tokens"):
            reader.read(each)


def chat_of_call(**arguments: Any) -> ChatPrompt:
    call = ToolCall(id="c", name="f", arguments=arguments)
    turns = (ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content="", tool_calls=(call,)))
    return ChatPrompt(messages=turns, tools=(ToolFunction(name="f", parameters={"type": "object"}),))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (chat_of_call(n=1), chat_of_call(n=True)),
        (chat_of_call(n=1), chat_of_call(n=1.0)),
        (chat_of_call(a=1, b=2), chat_of_call(b=2, a=1)),
        (chat_of_call(a="\ud800"), chat_of_call(a="\ud801")),
    ],
    ids=["true for one", "one as a fraction", "another order", "half a character"],
)
def test_a_prompt_that_python_takes_for_an_equal_one_is_made_by_itself(first: ChatPrompt, second: ChatPrompt) -> None:
    kept: RecentPrompts[str] = RecentPrompts()
    assert kept.made_of(written(first), lambda: "first") == "first"
    assert kept.made_of(written(second), lambda: "second") == "second"
    assert kept.made_of(written(first), lambda: "again") == "first"
