"""Rendered chats equal transformers' `apply_chat_template`, for templates in the manner of several model families."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from oracles.tokenizer_models import SPECIAL_TOKENS, write_byte_level
from stageline_api.engine_http import ChatMessage, ChatPrompt, ToolFunction
from stageline_runtime.engine.text.chat_template import ChatTemplate
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.engine.text.template_files import read_tokenizer_config
from stageline_runtime.termination import RuntimeFailure

CHATML_WITH_DEFAULT_SYSTEM = """
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
SCANNING_FROM_THE_END = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- set found = namespace(last_user=-1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if found.looking and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set found.looking = false %}
        {%- set found.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}{% set text = message.content %}{% endif %}
    {%- set mark = '*' if loop.index0 == found.last_user else '' %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ text ~ mark ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>' }}{% endif %}
{%- endif %}
"""
HEADERS_AND_DATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
[system] Today: {{ date_string }}
{{ system }}{{ eos_token }}
{% for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('No turn.') }}{% endif %}
[{{ message.role }}] {{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}[assistant] {% endif %}"""
LOOP_CONTROLS_AND_GENERATION = """{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
    {% if message.role == 'assistant' %}
[a]{% generation %}{{ message.content }}{% set leaked = 'x' %}{% endgeneration %}{{ leaked }}
    {% else %}
[u]{{ message | tojson }}{{ message.content | tojson(indent=2) }}{{ unk_token }}
    {% endif %}
{% if loop.index > 4 %}{% break %}{% endif %}
{% endfor %}"""

TEMPLATES = {
    "chatml": CHATML_WITH_DEFAULT_SYSTEM,
    "scanning": SCANNING_FROM_THE_END,
    "headers": HEADERS_AND_DATE,
    "controls": LOOP_CONTROLS_AND_GENERATION,
}
CHATS = {
    "one": [("user", "What is the capital of France?")],
    "system": [("system", "  Be kind. "), ("user", "Hi\n")],
    "turns": [
        ("user", "a"),
        ("assistant", "<think>\nhm</think>\n\nb"),
        ("user", "c"),
        ("assistant", "d"),
        ("user", ""),
    ],
    "markup": [("user", "<b>&amp;'\"</b> {{ 7 * 7 }} {% raw %} é😀\u2028 <|im_end|>")],
}


def chat(turns: list[tuple[str, str]]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=role, content=content) for role, content in turns)


def oracle(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("turns", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_text_and_ids_equal_transformers(tmp_path: Path, source: str, turns: list[tuple[str, str]]) -> None:
    directory = write_byte_level(tmp_path, chat_template=source, unk_token="<s>", template_adds_bos=True)
    reader = PromptReader.load(directory, vocab_size=260, max_model_len=4096, eos_token_ids=[1])
    assert reader.chat_template is not None
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = oracle(directory)
    started_on = None
    while started_on != datetime.now().date():  # one of the templates says the date
        started_on = datetime.now().date()
        text = expected.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        rendered = reader.chat_template.render(chat(turns))
        ids = expected.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
        own_ids = list(reader.render_prompt(ChatPrompt(messages=chat(turns))))
    assert rendered == text
    assert own_ids == ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"tokenizer_config.json": {"chat_template": "A"}}, "A", id="string"),
        pytest.param(
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
            id="named",
        ),
        pytest.param(
            {"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "R"}]}}, None, id="no-default"
        ),
        pytest.param(
            {"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "J"}, "J", id="own-file-wins"
        ),
        pytest.param({"chat_template.json": {"chat_template": "S"}}, "S", id="json-file"),
        pytest.param({"tokenizer_config.json": {}}, None, id="none"),
    ],
)
def test_template_is_found(tmp_path: Path, files: dict[str, Any], expected: str | None) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    assert read_tokenizer_config(tmp_path).chat_templates.get("default") == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param("tokenizer_config.json", "{", "tokenizer_config.json can't be read", id="json"),
        pytest.param("tokenizer_config.json", "[]", "must hold a JSON object", id="object"),
        pytest.param("tokenizer_config.json", '{"chat_template": 7}', "must be a string or a list, not int", id="type"),
        pytest.param(
            "tokenizer_config.json", '{"chat_template": [{"name": "rag"}]}', "not a name with its template", id="named"
        ),
        pytest.param("chat_template.jinja", b"\xff", "chat_template.jinja can't be read", id="encoding"),
    ],
)
def test_broken_settings_stop_the_start_with_the_file_named(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RuntimeFailure, match=words):
        read_tokenizer_config(tmp_path)


def test_special_tokens_come_from_either_file_and_either_form(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<old>", "pad_token": "<pad>"}', encoding="utf-8")
    config = {"eos_token": {"content": "<s>", "special": True}, "unk_token": None, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    expected = {"bos_token": "<old>", "pad_token": "<pad>", "eos_token": SPECIAL_TOKENS[0]}
    assert read_tokenizer_config(tmp_path).special_tokens == expected


def test_a_template_that_is_not_jinja_stops_the_start_with_the_line_named() -> None:
    with pytest.raises(RuntimeFailure, match="not valid Jinja: line 2"):
        ChatTemplate("fine\n{% for %}", {})


TOOL = ToolFunction(name="f", description="d", parameters={"type": "object", "properties": {}})
TOOLS = [{"type": "function", "function": structs.asdict(TOOL)}]
WITH_TOOLS = "{{ tools | tojson }}<tool_call>" + TEMPLATES["chatml"]


@pytest.mark.parametrize("is_list", [True, False], ids=["list", "folder"])
def test_a_template_named_tool_use_is_for_chats_with_tools(tmp_path: Path, is_list: bool) -> None:
    if is_list:
        named = [{"name": "tool_use", "template": WITH_TOOLS}, {"name": "default", "template": TEMPLATES["chatml"]}]
        directory = write_byte_level(tmp_path, chat_template=named)
    else:
        directory = write_byte_level(tmp_path, chat_template="unused")
        (directory / "chat_template.jinja").write_text(TEMPLATES["chatml"], encoding="utf-8")
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates/tool_use.jinja").write_text(WITH_TOOLS, encoding="utf-8")
    reader = PromptReader.load(directory, vocab_size=260, max_model_len=4096, eos_token_ids=[1])
    messages = [{"role": "user", "content": "hi"}]
    for tools, given in (((TOOL,), TOOLS), ((), None)):
        prompt = ChatPrompt(messages=chat([("user", "hi")]), tools=tools)
        expected = oracle(directory).apply_chat_template(messages, tools=given, add_generation_prompt=True)
        assert list(reader.render_prompt(prompt)) == expected["input_ids"], tools
        assert reader.tool_call_format(prompt) == ("tagged" if tools else None)
