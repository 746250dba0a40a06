"""Tools, items and blocks that a model of text can't call or read: left out and named, read as text, or refused."""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import ScriptedEngine
from stageline_api.engine_http import ChatPrompt
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.dialects.prepared import prepare_message, prepare_response
from stageline_gateway.openai_api.translate import Prepared, prepare_chat

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"town": {"type": "string"}}}
IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
OF_TEXT = "data:text/plain;base64," + base64.b64encode(b"Fjords").decode()
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}
MESSAGES_TOOL = {"name": "weather", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}
CUSTOM_RESULT = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}


def response(**extra: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Rain?"} | extra


def items(*more: Any) -> dict[str, Any]:
    return response(input=[{"role": "user", "content": "Rain?"}, *more])


def message(*content: Any, **extra: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": list(content) or "Rain?"}]
    return {"model": MODEL, "max_tokens": 9, "messages": turns} | extra


def result(*content: Any) -> dict[str, Any]:
    return message({"type": "tool_result", "tool_use_id": "c", "content": list(content)})


def chat(*messages: Any, **extra: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages) or [{"role": "user", "content": "Rain?"}]} | extra


def prompt_of(prepared: Prepared) -> ChatPrompt:
    prompt = prepared.generate.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


TOOLS = [
    (
        prepare_response,
        response(),
        RESPONSES_TOOL,
        [{"type": "image_generation", "output_format": "png"}],
    ),
    (
        prepare_response,
        response(tool_choice="auto"),
        RESPONSES_TOOL,
        [{"type": "web_search", "external_web_access": 1}],
    ),
    (
        prepare_response,
        response(),
        RESPONSES_TOOL,
        [{"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, {"type": "web_search_preview"}],
    ),
    (prepare_response, response(), RESPONSES_TOOL, [{"type": "mcp", "server_label": "s", "server_url": "u"}]),
    (prepare_response, response(), RESPONSES_TOOL, [{"type": "a_tool_of_next_year", "any": {"thing": [1]}}]),
    (prepare_message, message(), MESSAGES_TOOL, [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]),
    (prepare_message, message(), MESSAGES_TOOL, [{"type": "bash_20250124", "name": "bash"}]),
    (prepare_message, message(tool_choice={"type": "auto"}), MESSAGES_TOOL, [{"type": "mcp_toolset"}]),
    (prepare_chat, chat(), CHAT_TOOL, [{"type": "custom", "custom": {"name": "sql"}}]),
    (prepare_chat, chat(tool_choice="auto"), CHAT_TOOL, [{"type": "web_search"}]),
    (
        prepare_response,
        response(),
        RESPONSES_TOOL,
        [{"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": SCHEMA}],
    ),
    (prepare_response, response(), RESPONSES_TOOL, [RESPONSES_TOOL | {"type": "local_shell"}]),
    (prepare_message, message(), MESSAGES_TOOL, [MESSAGES_TOOL | {"type": "memory_20250818"}]),
    (prepare_message, message(), MESSAGES_TOOL, [MESSAGES_TOOL | {"type": "custom_tool"}]),
    (prepare_chat, chat(), CHAT_TOOL, [{"type": "builtin_function", "function": {"name": "$web_search"}}]),
]
Prepare = Callable[[Mapping[str, Any], bool], Prepared]


@pytest.mark.parametrize(("prepare", "fields", "tool", "others"), TOOLS)
def test_tools_that_can_not_be_called_are_left_out_and_named(
    prepare: Prepare, fields: dict[str, Any], tool: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    names = tuple(f"tools[{other['type']}]" for other in others)
    prepared = prepare(fields | {"tools": [others[0], tool, *others[1:]]}, False)
    assert [one.name for one in prompt_of(prepared).tools] == ["weather"]
    assert prepared.ignored == names
    alone = prepare(fields | {"tools": others}, False)
    assert (prompt_of(alone).tools, alone.ignored) == ((), names)
    with pytest.raises(ApiError) as refused:
        prepare(fields | {"tools": [tool, *others]}, True)
    assert refused.value.param is not None
    assert refused.value.param.startswith("tools[")


@pytest.mark.parametrize(("prepare", "fields", "tool", "others"), TOOLS)
def test_what_is_wrong_with_a_tool_is_named_at_its_own_index(
    prepare: Prepare, fields: dict[str, Any], tool: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    place = "tools[2].function.name" if prepare is prepare_chat else "tools[2].name"
    with pytest.raises(ApiError) as refused:
        prepare(fields | {"tools": [tool, others[0], tool]}, False)
    assert (refused.value.param, place in refused.value.message) == (place, True)


@pytest.mark.parametrize(
    ("prepare", "fields"),
    [
        (prepare_response, response(tools=[RESPONSES_TOOL | {"type": "fucntion"}])),
        (prepare_response, response(tools=[CHAT_TOOL | {"type": "tool"}])),
        (prepare_response, response(tools=[{"type": "No header\r\n"}])),
        (prepare_message, message(tools=[MESSAGES_TOOL | {"type": "custmo"}])),
        (prepare_message, message(tools=[CHAT_TOOL])),
        (prepare_chat, chat(tools=[CHAT_TOOL | {"type": "fucntion"}])),
        (prepare_chat, chat(tools=[CHAT_TOOL | {"type": "functions"}])),
        (prepare_chat, chat(tools=[CHAT_TOOL | {"type": "func"}])),
    ],
)
def test_a_function_of_a_wrong_type_is_still_a_mistake(prepare: Prepare, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        prepare(fields, False)
    assert refused.value.param in ("tools[0].type", "tools[0].name")


@pytest.mark.parametrize(
    ("prepare", "fields", "choice"),
    [
        (prepare_response, response(tools=[{"type": "web_search"}]), "required"),
        (prepare_message, message(tools=[{"type": "web_search_20250305", "name": "web_search"}]), {"type": "any"}),
        (prepare_chat, chat(tools=[{"type": "custom", "custom": {"name": "sql"}}]), "required"),
    ],
)
def test_a_call_can_not_be_forced_of_tools_that_were_left_out(
    prepare: Prepare, fields: dict[str, Any], choice: Any
) -> None:
    with pytest.raises(ApiError) as refused:
        prepare(fields | {"tool_choice": choice}, False)
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c", "output": "a"},
        {"type": "mcp_list_tools", "server_label": "s", "tools": []},
        {"type": "tool_search_output", "call_id": "c", "tools": []},
        {"type": "image_generation_call", "id": "ig", "result": "aGk="},
    ],
    ids=lambda item: item["type"],
)
def test_items_of_other_servers_are_left_out_and_named(item: dict[str, Any]) -> None:
    prepared = prepare_response(items(item, {"role": "user", "content": "And now?"}), False)
    assert [one.content for one in prompt_of(prepared).messages] == ["Rain?", "And now?"]
    assert prepared.ignored == (f"input[{item['type']}]",)
    with pytest.raises(ApiError) as refused:
        prepare_response(items(item, {"role": "user", "content": 1}), False)
    assert refused.value.param == "input[2].content"


def test_calls_of_custom_tools_are_read_as_calls() -> None:
    parts = CUSTOM_RESULT | {"output": [{"type": "input_text", "text": "done"}], "name": "apply_patch"}
    for outcome in (CUSTOM_RESULT, parts):
        user, called, told = prompt_of(prepare_response(items(CUSTOM_CALL, outcome), False)).messages
        assert (user.content, told.role, told.content, told.tool_call_id) == ("Rain?", "tool", "done", "c")
        assert [(one.name, one.arguments) for one in called.tool_calls] == [("apply_patch", {"input": "*** Begin"})]


@pytest.mark.parametrize("strict", [False, True])
def test_calls_of_custom_tools_in_a_chat_are_read_as_calls(strict: bool) -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}}
    turns: list[Any] = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    called = prompt_of(prepare_chat(chat(*turns), strict)).messages[1]
    assert [(one.name, one.arguments) for one in called.tool_calls] == [("apply_patch", {"input": "*** Begin"})]


@pytest.mark.parametrize("strict", [False, True])
def test_a_refusal_of_an_earlier_answer_is_text(strict: bool) -> None:
    refusal = {"type": "refusal", "refusal": "I can't."}
    said = {"role": "assistant", "content": [refusal]}
    assert prompt_of(prepare_response(items(said), strict)).messages[1].content == "I can't."
    assert (
        prompt_of(prepare_chat(chat({"role": "user", "content": "?"}, said), strict)).messages[1].content == "I can't."
    )


@pytest.mark.parametrize(
    ("prepare", "fields", "named", "text"),
    [
        (
            prepare_message,
            result({"type": "text", "text": "Seen: "}, IMAGE),
            "messages.content[image]",
            "image left out",
        ),
        (
            prepare_message,
            result({"type": "tool_reference", "tool_name": "weather"}),
            "messages.content[tool_reference]",
            "Tool: weather",
        ),
        (
            prepare_message,
            result({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "a"}}),
            "messages.content[document]",
            "document left out",
        ),
        (
            prepare_response,
            items({"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}),
            "input.output[input_image]",
            "input_image left out",
        ),
        (
            prepare_response,
            items(CUSTOM_CALL, CUSTOM_RESULT | {"output": [INPUT_IMAGE]}),
            "input.output[input_image]",
            "input_image left out",
        ),
        (
            prepare_chat,
            chat({"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Seen: "}, IMAGE_URL]}),
            "messages.content[image_url]",
            "image_url left out",
        ),
    ],
)
def test_what_can_not_be_read_of_a_result_is_named_and_leaves_a_note(
    prepare: Prepare, fields: dict[str, Any], named: str, text: str
) -> None:
    prepared = prepare(fields, False)
    told = next(one for one in prompt_of(prepared).messages if one.role == "tool")
    assert (text in told.content, "aGk=" in told.content, prepared.ignored) == (True, False, (named,))
    with pytest.raises(ApiError):
        prepare(fields, True)


@pytest.mark.parametrize(
    ("prepare", "fields"),
    [
        (prepare_message, message({"type": "text", "text": "What is this?"}, IMAGE)),
        (prepare_message, message({"type": "document", "source": {"type": "url", "url": "https://x/y.pdf"}})),
        (prepare_message, message({"type": "container_upload", "file_id": "f"})),
        (prepare_response, items({"role": "user", "content": [INPUT_IMAGE]})),
        (prepare_response, items({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]})),
        (prepare_chat, chat({"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE_URL]})),
        (prepare_chat, chat({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]})),
    ],
)
def test_an_image_in_a_question_is_refused_with_the_reason(prepare: Prepare, fields: dict[str, Any]) -> None:
    for strict in (False, True):
        with pytest.raises(ApiError) as refused:
            prepare(fields, strict)
        assert "read text alone" in refused.value.message
        assert (refused.value.param or "").endswith(".type")


@pytest.mark.parametrize(
    ("prepare", "fields", "texts"),
    [
        (
            prepare_message,
            message(
                {
                    "type": "document",
                    "title": "Norway",
                    "source": {"type": "text", "media_type": "text/plain", "data": "Fjords"},
                    "citations": {"enabled": True},
                },
                {"type": "text", "text": "What is there?"},
            ),
            ("Norway", "Fjords", "What is there?"),
        ),
        (
            prepare_message,
            message(
                {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Fjords"}]}}
            ),
            ("Fjords",),
        ),
        (
            prepare_message,
            result({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Fjords"}}),
            ("Fjords",),
        ),
        (
            prepare_message,
            result(
                {
                    "type": "search_result",
                    "source": "a page",
                    "title": "Norway",
                    "content": [{"type": "text", "text": "Fjords"}],
                }
            ),
            ("a page", "Norway", "Fjords"),
        ),
        (prepare_message, message({"type": "compaction", "content": "Fjords"}), ("Fjords",)),
        (
            prepare_response,
            items({"role": "user", "content": [{"type": "input_file", "filename": "n.txt", "file_data": OF_TEXT}]}),
            ("n.txt", "Fjords"),
        ),
        (
            prepare_chat,
            chat({"role": "user", "content": [{"type": "file", "file": {"filename": "n.txt", "file_data": OF_TEXT}}]}),
            ("n.txt", "Fjords"),
        ),
    ],
)
def test_documents_of_text_are_read(prepare: Prepare, fields: dict[str, Any], texts: tuple[str, ...]) -> None:
    for strict in (False, True):
        prepared = prepare(fields, strict)
        last = prompt_of(prepared).messages[-1].content
        places = [last.find(text) for text in texts]
        assert -1 not in places, last
        assert prepared.ignored == ()


@pytest.mark.parametrize("beside", [5, None, [], "text", {}, {"filename": 5, "file_data": 7}])
def test_a_document_of_one_form_is_read_whatever_the_other_forms_field_holds(beside: Any) -> None:
    part = {"type": "input_file", "file_data": OF_TEXT, "file": beside}
    for prepared in (
        prepare_response(items({"role": "user", "content": [part]}), False),
        prepare_response(items({"type": "function_call_output", "call_id": "c", "output": [part]}), False),
    ):
        assert "Fjords" in prompt_of(prepared).messages[-1].content
    other = {"type": "file", "file": {"file_data": OF_TEXT, "filename": beside}, "file_data": beside}
    prepared = prepare_chat(chat({"role": "user", "content": [other]}), False)
    assert "Fjords" in prompt_of(prepared).messages[-1].content


@pytest.mark.parametrize("file", [5, None, [], "text", {}, {"file_data": 7}])
def test_a_file_without_its_data_is_refused_or_noted(file: Any) -> None:
    part = {"type": "file", "file": file}
    with pytest.raises(ApiError):
        prepare_chat(chat({"role": "user", "content": [part]}), False)
    prepared = prepare_chat(chat({"role": "tool", "tool_call_id": "c", "content": [part]}), False)
    assert prepared.ignored == ("messages.content[file]",)


def test_blocks_of_other_servers_are_left_out_and_named() -> None:
    searched = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]}
    said = {"role": "assistant", "content": [searched, found, {"type": "text", "text": "Rain."}]}
    turns = [*message()["messages"], said, {"role": "user", "content": "Sure?"}]
    prepared = prepare_message(message(messages=turns), False)
    assert [one.content for one in prompt_of(prepared).messages] == ["Rain?", "Rain.", "Sure?"]
    assert prepared.ignored == ("messages.content[server_tool_use]", "messages.content[web_search_tool_result]")


@pytest.mark.parametrize(("prepare", "long"), [(prepare_response, RESPONSES_TOOL), (prepare_message, MESSAGES_TOOL)])
def test_names_of_tools_have_up_to_128_characters(prepare: Prepare, long: dict[str, Any]) -> None:
    fields = response() if prepare is prepare_response else message()
    prepared = prepare(fields | {"tools": [long | {"name": "m" * 128}]}, False)
    assert prompt_of(prepared).tools[0].name == "m" * 128
    with pytest.raises(ApiError) as refused:
        prepare(fields | {"tools": [long | {"name": "m" * 129}]}, False)
    assert refused.value.param == "tools[0].name"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", response(tools=[{"type": "web_search"}])),
        ("/v1/messages", message(tools=[{"type": "web_search_20250305", "name": "web_search"}])),
        ("/v1/chat/completions", chat(tools=[{"type": "web_search"}])),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_header_of_the_answer_has_the_names(
    gateway: RunningGateway, engine: ScriptedEngine, path: str, fields: dict[str, Any], stream: bool
) -> None:
    answered = gateway.http.post(path, json=fields | {"stream": stream})
    assert answered.status_code == 200, answered.text
    assert answered.headers["x-stageline-ignored"] == f"tools[{fields['tools'][0]['type']}]"
    assert "Hello" in answered.text
    assert len(engine.requests) == 1
