"""A chat goes on after a call that the token limit cut off: its part of an object reaches any template, in every API.

The answers are scripted; prompts are read by the engine's own reader, through chat templates of each kind.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from oracles.tokenizer_models import write_byte_level
from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import Admitted, ChatPrompt, Delta, Finished, FinishReason, GenerateRequest
from stageline_gateway.settings import GatewaySettings
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.prompts import PromptReader

CUT = '{"town": "Os", "days": [1, {"a'
USER: Any = {"role": "user", "content": "Rain?"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"town": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
RESPONSE_TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
EACH_CALL = "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
ENDS = "{% endfor %}|{% endfor %}"
ARGUMENTS = "call.function.arguments"
PAIRS = "{{ name }}={{ value }};{% endfor %}"
AS_OBJECT = "town=Os;days=[1, {}];"
TEMPLATES = {
    "any, as JSON": ("{{ " + ARGUMENTS + " | tojson }}", json.dumps(CUT)),
    "text or object": ("{{ " + f"{ARGUMENTS} if {ARGUMENTS} is string else {ARGUMENTS} | tojson" + " }}", CUT),
    "text alone": ("{{ '[' + " + ARGUMENTS + " + ']' }}", f"[{CUT}]"),
    "items of an object": ("{% for name, value in " + ARGUMENTS + ".items() %}" + PAIRS, AS_OBJECT),
    "pairs of an object": ("{% for name, value in " + ARGUMENTS + " | items %}" + PAIRS, AS_OBJECT),
    "what it checks": (
        "{% if " + ARGUMENTS + " is not mapping %}{{ raise_exception('no object') }}{% endif %}"
        "{% for name, value in " + ARGUMENTS + ".items() %}" + PAIRS,
        AS_OBJECT,
    ),
}


def template_of(kind: str) -> str:
    return EACH_CALL + TEMPLATES[kind][0] + ENDS


class Seen:
    """An engine's script that reads prompts by a template: a call that is cut off first, words from then on."""

    def __init__(self, directory: Path, template: str, cut: str = CUT) -> None:
        write_byte_level(directory, chat_template=template)
        self._reader = PromptReader.load(directory, vocab_size=260, max_model_len=4096, eos_token_ids=[1])
        self._cut = cut
        self.prompts: list[str] = []

    def __call__(self, request: GenerateRequest) -> list[Step]:
        try:
            read = self._reader.read(request)
        except PromptError as error:
            return [Refuse(400, error.body())]
        self.prompts.append(self._reader.detokenize(read.prompt_token_ids))
        if len(self.prompts) > 1:
            return answer("Wet", ".")
        pieces = [Say(Delta(text=self._cut[at : at + 5], token_ids=(at,))) for at in range(0, len(self._cut), 5)]
        end = Finished(reason=FinishReason.LENGTH, prompt_tokens=3, completion_tokens=len(pieces))
        return [Say(Admitted(prompt_tokens=3)), *pieces, Say(end)]


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def whole(client: OpenAI, **asked: Any) -> Any:
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "length"
    return choice.message


def put_together(client: OpenAI, **asked: Any) -> Any:
    calls: list[Any] = []
    for chunk in client.chat.completions.create(stream=True, **asked):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id:
                calls.append(call)
            else:
                calls[-1].function.arguments += call.function.arguments
    return {"role": "assistant", "tool_calls": calls}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("ask", [whole, put_together], ids=["whole", "streamed"])
def test_a_chat_goes_on(
    client: OpenAI, engine: ScriptedEngine, tmp_path: Path, kind: str, ask: Callable[..., Any]
) -> None:
    engine.script = seen = Seen(tmp_path, template_of(kind))
    message = ask(client, model=MODEL, messages=[USER], tools=[TOOL], tool_choice=NAMED)
    call = message["tool_calls"][0] if isinstance(message, dict) else message.tool_calls[0]
    assert call.function.arguments == CUT
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "no such town"}
    again = client.chat.completions.create(model=MODEL, messages=[USER, message, result])
    assert again.choices[0].message.content == "Wet."
    assert seen.prompts[-1] == f"Rain?|{TEMPLATES[kind][1]}|no such town|"


@pytest.mark.parametrize("dumped", [False, True])
def test_a_chat_goes_on_after_an_answer_cut_before_its_call(
    client: OpenAI, engine: ScriptedEngine, tmp_path: Path, dumped: bool
) -> None:
    """It has neither words nor calls."""
    engine.script = seen = Seen(tmp_path, template_of("any, as JSON"), cut='[{"na')
    message = whole(client, model=MODEL, messages=[USER], tools=[TOOL], tool_choice="required")
    assert (message.content, message.tool_calls) == (None, None)
    turns: Any = [USER, message.model_dump() if dumped else message, USER]
    assert client.chat.completions.create(model=MODEL, messages=turns).choices[0].message.content == "Wet."
    assert seen.prompts[-1] == "Rain?||Rain?|"


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_goes_on(client: OpenAI, engine: ScriptedEngine, tmp_path: Path, kind: str, stream: bool) -> None:
    engine.script = seen = Seen(tmp_path, template_of(kind))
    chosen: Any = {"type": "function", "name": "weather"}
    asked: Any = {"model": MODEL, "input": [USER], "tools": [RESPONSE_TOOL], "tool_choice": chosen}
    if stream:
        first = list(client.responses.create(stream=True, **asked))[-1].response
    else:
        first = client.responses.create(**asked)
    assert [(item.status, item.arguments) for item in first.output] == [("incomplete", CUT)]
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "no such town"}
    turns: Any = [USER, *first.output, result]
    assert client.responses.create(model=MODEL, input=turns).output_text == "Wet."
    assert seen.prompts[-1] == f"Rain?|{TEMPLATES[kind][1]}|no such town|"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_message_goes_on(gateway: RunningGateway, engine: ScriptedEngine, tmp_path: Path, stream: bool) -> None:
    """A whole message has no block of such a call, so it may have none at all; of a stream a client has its part."""
    engine.script = seen = Seen(tmp_path, template_of("items of an object"))
    body = {"model": MODEL, "max_tokens": 9, "messages": [USER]}
    choice = {
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    answered = gateway.http.post("/v1/messages", json=body | choice | {"stream": stream})
    if stream:
        events = [json.loads(line[6:]) for line in answered.text.splitlines() if line.startswith("data: ")]
        begun = next(event["content_block"] for event in events if event["type"] == "content_block_start")
        parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(parts) == CUT
        content = [begun | {"input": {"town": "Os", "days": [1, {}]}}]
        content_of_user: Any = [{"type": "tool_result", "tool_use_id": begun["id"], "content": "no such town"}]
    else:
        content, content_of_user = answered.json()["content"], "no such town"
        assert content == []
    turns = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": content_of_user}]
    again = gateway.http.post("/v1/messages", json=body | {"messages": turns})
    assert again.status_code == 200, again.text
    assert again.json()["content"][0]["text"] == "Wet."
    assert seen.prompts[-1] == f"Rain?|{AS_OBJECT if stream else ''}|no such town|"


def sent(arguments: str, **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"model": MODEL, "messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER]} | more


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", ""),
        (" \n", ""),
        ("null", ""),
        ("{", ""),
        ('{"a": 1}', "a=1;"),
        ('{"a": 1, "b', "a=1;"),
        ('{"a": NaN}', 'arguments={"a": NaN};'),
        ('{"a": Oslo}', 'arguments={"a": Oslo};'),
        ("[]", "arguments=[];"),
        ("[" * 300, f"arguments={'[' * 300};"),
        ('{"a":' * 300, "arguments=" + '{"a":' * 300 + ";"),
        ('"x"', 'arguments="x";'),
        ("Oslo", "arguments=Oslo;"),
        ("{{ raise_exception('x') }}", "arguments={{ raise_exception('x') }};"),
        ('{"a": "\\ud83d', "a=;"),
        ('{"a": "\\ud83d"}', 'arguments={"a": "\\ud83d"};'),
    ],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_any_text_may_be_what_a_model_wrote(
    gateway: RunningGateway, engine: ScriptedEngine, tmp_path: Path, arguments: str, told: str
) -> None:
    engine.script = seen = Seen(tmp_path, template_of("items of an object"))
    answered = gateway.http.post("/v1/chat/completions", json=sent(arguments))
    assert answered.status_code == 200, answered.text
    assert seen.prompts == [f"Rain?|{told}|Rain?|"]


def test_a_strict_gateway_takes_its_own_words_back_too(tmp_path: Path, engine: ScriptedEngine) -> None:
    with running_gateway(GatewaySettings(tmp_path / "endpoints.json", strict_fields=True)) as gateway:
        gateway.serve(group(engine.url))
        assert gateway.http.post("/v1/chat/completions", json=sent(CUT)).status_code == 200
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1].tool_calls[0].arguments == CUT


def test_a_template_that_refuses_the_messages_says_why(
    gateway: RunningGateway, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """Not that it has no use for a text, which was tried too."""
    refuses = template_of("items of an object") + "{{ raise_exception('roles must alternate') }}"
    engine.script = Seen(tmp_path, refuses)
    for arguments in (CUT, '{"town": "Oslo"}'):
        answered = gateway.http.post("/v1/chat/completions", json=sent(arguments))
        assert answered.status_code == 400
        assert "roles must alternate" in answered.json()["error"]["message"]


def test_a_template_of_texts_alone_takes_objects_too(
    gateway: RunningGateway, engine: ScriptedEngine, tmp_path: Path
) -> None:
    engine.script = seen = Seen(tmp_path, template_of("text alone"))
    assert gateway.http.post("/v1/chat/completions", json=sent('{"town":"Oslo"}')).status_code == 200
    assert seen.prompts == ['Rain?|[{"town": "Oslo"}]|Rain?|']
