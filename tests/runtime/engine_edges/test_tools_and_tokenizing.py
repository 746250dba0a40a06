"""Tools reach the model through its template, as in transformers; prompts and ids turn into each other."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from oracles.tokenizer_models import write_byte_level
from processes.scripted_core_server import MAX_MODEL_LEN, ScriptedCore, ids_of, says, serve
from stageline_api.engine_http import ChatMessage, ChatPrompt, EngineError, ToolCall, ToolCallFormat, ToolFunction
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.chat_template import ChatTemplate
from stageline_runtime.engine.text.prompts import PromptReader

TAGGED = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write calls as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '(' ~ message.tool_call_id ~ ')' if message.role == 'tool' }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
WEATHER = ToolFunction(name="weather", description="Of a place", parameters={"type": "object", "properties": {}})
TURNS = (
    ChatMessage(role="user", content="Rain in Oslo?"),
    ChatMessage(
        role="assistant", content="", tool_calls=(ToolCall(id="c1", name="weather", arguments={"place": "Oslo"}),)
    ),
    ChatMessage(role="tool", content="wet", tool_call_id="c1"),
)


def reader(directory: Path, template: str) -> PromptReader:
    write_byte_level(directory, chat_template=template)
    return PromptReader.load(directory, vocab_size=260, max_model_len=4096, eos_token_ids=[1])


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_tools_and_calls_render_as_in_transformers(tmp_path: Path, add_generation_prompt: bool) -> None:
    from transformers import AutoTokenizer

    template = reader(tmp_path, TAGGED).chat_template
    assert template is not None
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "wet", "tool_call_id": "c1"},
    ]
    tools = [{"type": "function", "function": structs.asdict(WEATHER)}]
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert template.render(TURNS, [WEATHER], add_generation_prompt) == expected


@pytest.mark.parametrize("words", ["The answer", " The answer ", "Rain in Oslo?", "a\n b ", "<", "im", "|", " end "])
@pytest.mark.parametrize("template", [TAGGED, TAGGED.replace("message.content }}", "message.content | trim }}")])
def test_a_final_message_is_continued_as_in_transformers(tmp_path: Path, template: str, words: str) -> None:
    from transformers import AutoTokenizer

    turns = (TURNS[0], ChatMessage(role="assistant", content=words))
    prompt = ChatPrompt(messages=turns, add_generation_prompt=False, continue_final_message=True)
    read = reader(tmp_path, template)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert read.detokenize(read.render_prompt(prompt)) == expected


def test_a_final_message_that_the_template_hides_is_refused(tmp_path: Path) -> None:
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),), continue_final_message=True)
    with pytest.raises(PromptError, match="continue_final_message"):
        reader(tmp_path, "{{ messages | length }}").render_prompt(prompt)


@pytest.mark.parametrize("template", ["{{ messages[-1].content[:4] }}", PLAIN + PLAIN])
def test_a_final_message_that_is_not_shown_once_is_refused(template: str) -> None:
    with pytest.raises(PromptError, match="once, as they are"):
        ChatTemplate(template, {}).render_to_continue([ChatMessage(role="assistant", content="The answer")])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TAGGED, ToolCallFormat.TAGGED),
        ('{{ tools }}{"name": "f", "parameters": {}}', ToolCallFormat.OBJECT),
        ("{{ tools }}[TOOL_CALLS]", ToolCallFormat.ARRAY),
        ("{{ tools }}<tool_call><function=f>", None),
        ("{{ tools }}", None),
        (PLAIN + "<tool_call>", None),
        ("{% set tools = 1 %}{{ tools }}<tool_call>", None),
    ],
)
def test_the_template_tells_how_calls_are_written(source: str, expected: ToolCallFormat | None) -> None:
    assert ChatTemplate(source, {}).tool_call_format is expected


@pytest.mark.parametrize(("template", "words"), [(PLAIN, "no place for tools"), ("{{ tools }}", "isn't understood")])
def test_tools_are_refused_where_calls_could_not_be_read(tmp_path: Path, template: str, words: str) -> None:
    prompts = reader(tmp_path, template)
    prompt = ChatPrompt(messages=TURNS[:1], tools=(WEATHER,))
    with pytest.raises(PromptError, match=words) as refused:
        prompts.render_prompt(prompt)
    assert refused.value.body().param == "tools"
    prompts.render_prompt(structs.replace(prompt, tools_guided=True))


def post(directory: Path, path: str, body: object) -> httpx.Response:
    async def run() -> httpx.Response:
        async with serve(ScriptedCore(says("never")), directory) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


def test_text_and_ids_turn_into_each_other(tmp_path: Path) -> None:
    asked = {"prompt": {"kind": "text", "text": "hé"}, "with_texts": True}
    tokenized = post(tmp_path, "/v1/tokenize", asked).json()
    assert tokenized == {"token_ids": list(ids_of("hé")), "max_model_len": MAX_MODEL_LEN, "texts": ["h", "Ã", "©"]}
    assert post(tmp_path, "/v1/detokenize", {"token_ids": [*ids_of("hé"), 1]}).json() == {"text": "hé</s>"}
    assert post(tmp_path, "/v1/detokenize", {"token_ids": []}).json() == {"text": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/detokenize", {"token_ids": [260]}, "tokens"),
        ("/v1/detokenize", {"token_ids": "x"}, "token_ids"),
        ("/v1/tokenize", {"prompt": {"kind": "tokens", "token_ids": [-1]}}, "prompt"),
        ("/v1/tokenize", {}, "prompt"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(tmp_path: Path, path: str, body: object, param: str) -> None:
    answered = post(tmp_path, path, body)
    assert answered.status_code == 400
    assert EngineError.from_json(answered.content).param == param
