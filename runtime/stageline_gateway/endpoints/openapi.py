"""The OpenAPI document of the public port, made from the very types that check requests.

What the types can't say is added here: that null counts as absent, and the parameters of OpenAI's that are taken only
with a value that asks for nothing. Rules between fields are not in it; what breaks them gets a 400 that names it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from stageline_api.version import stageline_version
from stageline_gateway.openai_api.checked_types import OneOf, optional_fields
from stageline_gateway.openai_api.dialects.messages_request import (
    BLOCK_IGNORED,
    MESSAGES_KNOWN,
    MessagesRequest,
)
from stageline_gateway.openai_api.dialects.responses_request import (
    ITEM_IGNORED,
    ITEM_REPEATED,
    PART_REPEATED,
    RESPONSES_KNOWN,
    RESULT_IGNORED,
    ResponsesRequest,
)
from stageline_gateway.openai_api.dialects.responses_request import PART_IGNORED as RESPONSE_PART_IGNORED
from stageline_gateway.openai_api.dialects.responses_tools import FUNCTION_TOOL_IGNORED
from stageline_gateway.openai_api.known_fields import (
    CALL_IGNORED,
    CALLED_FUNCTION_IGNORED,
    CHAT_KNOWN,
    COMPLETION_KNOWN,
    FUNCTION_IGNORED,
    GUIDE_IGNORED,
    GUIDED,
    MESSAGE_IGNORED,
    PART_IGNORED,
    STREAM_IGNORED,
    TOOL_IGNORED,
    Fate,
    Known,
)
from stageline_gateway.openai_api.request_types import ChatRequest, CompletionRequest
from stageline_gateway.openai_api.tokenize_requests import OF_PROMPT, DetokenizeBody, TokenizeOptions

JSON: Final = "application/json"
_STATUSES: Final = {
    400: "A field is wrong, or the request is not valid HTTP.",
    401: "No known API key.",
    403: "The key may not use this model.",
    404: "No such model or path.",
    405: "No such method here.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "A limit of the key is reached.",
    431: "The headers are too large.",
    499: "The client left.",
    502: "The engine failed.",
    503: "Not now: try again after `Retry-After`.",
}
_OPEN: Final = (400, 408, 431, 503)
"""Of any path: 503 is also what a connection over `--connection-limit` gets."""
_ANY: Final = (*_OPEN, 401)
_ON_MODEL: Final = (*_ANY, 403, 404)
_WITH_BODY: Final = (*_ON_MODEL, 413, 415, 429, 502)

_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_COUNTS: Final = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "additionalProperties": True,
}


_BARE: Final = {"200": {"description": "It can."}, "503": {"description": "It can't."}}


def document(with_keys: bool = False, strict: bool = False) -> dict[str, Any]:
    """The whole document, of a gateway that asks for keys or doesn't, and ignores fields or refuses them."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    bodies: list[tuple[type[Struct], Mapping[str, Known]]] = [
        (ChatRequest, CHAT_KNOWN),
        (CompletionRequest, COMPLETION_KNOWN),
        (ResponsesRequest, RESPONSES_KNOWN),
        (MessagesRequest, MESSAGES_KNOWN),
        (DetokenizeBody, COMPLETION_KNOWN),
    ]
    for model, known in bodies:
        schemas |= _schemas_of(model, known, strict)
    message = schemas["MessagesRequest"]
    schemas["CountTokensBody"] = message | {"required": [name for name in message["required"] if name != "max_tokens"]}
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        schemas[name]["properties"] |= {old: {} for old in GUIDED}
    schemas |= _tokenize_bodies(schemas, strict)
    for name, repeated in _REPEATED_IN.items():
        schemas[name]["properties"] |= {field: {} for field in repeated}
    if not strict:
        for name, ignored in _IGNORED_IN.items():
            _make_lenient(schemas[name], ignored)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stageline gateway", "version": stageline_version()},
        "paths": _paths(),
        "security": [{"key": []}] if with_keys else [],
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _tokenize_bodies(schemas: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """What `/tokenize` takes: a chat's body or a completion's; a strict gateway takes of it what makes the prompt."""
    options = _schemas_of(TokenizeOptions, {}, strict)["TokenizeOptions"]["properties"]
    chat, completion = (
        asked | {"properties": {name: _asked_about(name, rule, strict) for name, rule in asked["properties"].items()}}
        for asked in (schemas["ChatRequest"], schemas["CompletionRequest"])
    )
    chat["properties"] |= options
    completion["properties"] |= options | {"prompt": {"type": "string"}}
    either = [{"$ref": f"#/components/schemas/{name}"} for name in ("TokenizeChat", "TokenizeCompletion")]
    return {"TokenizeChat": chat, "TokenizeCompletion": completion, "TokenizeBody": {"anyOf": either}}


def _asked_about(name: str, rule: dict[str, Any], strict: bool) -> dict[str, Any]:
    """A field of a body that is only asked about."""
    if name in OF_PROMPT or not strict or "enum" in rule:
        return rule
    usual = {**optional_fields(CompletionRequest), **optional_fields(ChatRequest)}.get(name)
    return {"enum": [None] if usual is None else [usual, None]}


_ITEMS: Final = ("InputMessage", "InputCall", "InputCustomCall", "InputResult", "InputReasoning")
_REPEATED_IN: Final = {**dict.fromkeys(_ITEMS, ITEM_REPEATED), "InputText": PART_REPEATED}
_IGNORED_IN: Final = {
    **dict.fromkeys(_ITEMS, ITEM_IGNORED),
    "InputResult": RESULT_IGNORED,
    "InputText": RESPONSE_PART_IGNORED,
    **dict.fromkeys(("TextBlock", "ToolUse", "ToolResult", "Thinking"), BLOCK_IGNORED),
    "CustomTool": TOOL_IGNORED,
    "FunctionTool": FUNCTION_TOOL_IGNORED,
    "NamespaceTool": TOOL_IGNORED,
    "Turn": frozenset[str](),
    "Tool": TOOL_IGNORED,
    "Function": FUNCTION_IGNORED,
    "Message": MESSAGE_IGNORED,
    "MadeCall": CALL_IGNORED,
    "CalledFunction": CALLED_FUNCTION_IGNORED,
    "TextPart": PART_IGNORED,
    "StreamOptions": STREAM_IGNORED,
    "StructuredOutputs": GUIDE_IGNORED,
}


def _make_lenient(schema: dict[str, Any], ignored: Iterable[str]) -> None:
    """Let `schema` have the fields that are `ignored`, and null for any that need not be there, known or not."""
    required = schema.get("required", [])
    for name, rule in schema["properties"].items():
        if name not in required:
            schema["properties"][name] = {"anyOf": [_without_default(rule), {"type": "null"}]}
    schema["properties"] |= {name: {} for name in ignored}
    schema["additionalProperties"] = {"type": "null"}


def _schemas_of(model: type[Struct], known: Mapping[str, Known], strict: bool) -> dict[str, Any]:
    """The schema of `model`, by name, and those it refers to."""
    _, schemas = msgspec.json.schema_components(
        [model, *(struct for kind in OneOf.__subclasses__() for struct in kind.structs())],
        schema_hook=_one_of,
        ref_template="#/components/schemas/{name}",
    )
    schema = schemas[model.__name__]
    properties, required = schema["properties"], schema["required"]
    for name in properties:
        if name not in required:
            properties[name] = {"anyOf": [_without_default(properties[name]), {"type": "null"}]}
    properties |= {name: _known(rule, strict) for name, rule in known.items()}
    return schemas


def _one_of(kind: type[OneOf]) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"#/components/schemas/{one.__name__}"} for one in kind.structs()]}


def _known(rule: Known, strict: bool) -> dict[str, Any]:
    """A field that is no part of the request: anything where it is ignored, else what asks for nothing."""
    return {} if rule.fate is Fate.IGNORED and not strict else {"enum": [*rule.neutral, None]}


def _without_default(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "default"}


def _answers(done: dict[str, Any], statuses: Iterable[int]) -> dict[str, Any]:
    refused = {"schema": {"$ref": "#/components/schemas/Error"}}
    answers: dict[str, Any] = {
        str(status): {"description": _STATUSES[status], "content": {JSON: refused}} for status in sorted(statuses)
    }
    return {"200": {"description": "Done."} | done} | answers


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "required": [*required, *properties], "properties": properties}
    return {"content": {JSON: {"schema": schema}}}


def _post(summary: str, body: str, done: dict[str, Any]) -> dict[str, Any]:
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{body}"}}}
    operation = {"summary": summary, "requestBody": {"required": True, "content": content}}
    return {"post": operation | {"responses": _answers(done, _WITH_BODY)}}


def _in_anthropics_form(path: dict[str, Any]) -> dict[str, Any]:
    """`path`, whose refusals have Anthropic's form unless they come before the request is read."""
    kind = {"type": "object", "required": ["type", "message"]}
    theirs = {"type": "object", "required": ["type", "error"], "properties": {"error": kind}}
    for status, answer in path["post"]["responses"].items():
        if status != "200":
            schema = answer["content"][JSON]["schema"]
            answer["content"] = {JSON: {"schema": {"anyOf": [theirs, schema]}}}
    return path


def _get(summary: str, done: dict[str, Any], statuses: Iterable[int], *parameters: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"summary": summary, "parameters": list(parameters), "responses": _answers(done, statuses)}}


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _paths() -> dict[str, Any]:
    text = {"type": "string"}
    ids = {"type": "array", "items": {"type": "integer"}}
    whole = _object("choices", id=text, object=text, created={"type": "integer"}, model=text, usage=_COUNTS)
    events = "With `stream`: events whose data is a chunk as JSON, or an Error, or the end mark [DONE]."
    whole["content"]["text/event-stream"] = {"schema": {"description": events}}
    model = _object(id=text, object={"const": "model"}, ready={"type": "boolean"}, groups={"type": "array"})
    tokens = _object(count={"type": "integer"}, max_model_len={"type": "integer"}, tokens=ids)
    window = _parameter("window_seconds", "query", {"type": "number", "minimum": 0.1, "maximum": 10})
    of_model = (_parameter("model", "query", text), _parameter("group", "query", {"type": "string"}), window)
    no_embeddings = {"post": {"summary": "Refused: no model here makes embeddings", "responses": _refused(_ANY)}}
    response = _object("output", id=text, object={"const": "response"}, status=text)
    response["content"]["text/event-stream"] = {"schema": {"description": "With `stream`: events of OpenAI's names."}}
    stored: dict[str, Any] = {
        "summary": "Refused: nothing is stored",
        "parameters": [_parameter("response", "path", text)],
    }
    stored["responses"] = _refused((*_ANY, 404, 429))
    message = _object("content", id=text, type={"const": "message"}, usage={"type": "object"})
    message["content"]["text/event-stream"] = {"schema": {"description": "With `stream`: events of Anthropic's names."}}
    counted = _object(input_tokens={"type": "integer"})
    return {
        "/v1/messages": _in_anthropics_form(_post("Answer as Anthropic does", "MessagesRequest", message)),
        "/v1/messages/count_tokens": _in_anthropics_form(_post("Count a prompt's tokens", "CountTokensBody", counted)),
        "/v1/responses": _post("Answer in the form of responses", "ResponsesRequest", response),
        "/v1/responses/{response}": {"get": stored, "delete": stored},
        "/v1/chat/completions": _post("Answer a chat", "ChatRequest", whole),
        "/v1/completions": _post("Continue a text", "CompletionRequest", whole),
        "/v1/embeddings": no_embeddings,
        "/v1/models": _get("What is served", _object(object=text, data={"type": "array"}), _ANY),
        "/v1/models/{model}": _get("One model", model, _ON_MODEL, _parameter("model", "path", text)),
        "/tokenize": _post("A prompt's token ids", "TokenizeBody", tokens),
        "/detokenize": _post("Token ids as text", "DetokenizeBody", _object(prompt=text)),
        "/pipeline": _get("What stages did lately", _object("stages", model=text), _ON_MODEL, *of_model),
        "/version": _get("Stageline's version", _object(version=text), _ANY),
        "/health": _open({"get": {"summary": "Whether it can serve, without a word", "responses": _BARE}}),
        "/healthz": _open(_get("Whether the gateway runs", _object(status=text), _OPEN)),
        "/readyz": _ready(_object(status=text)),
    }


def _ready(done: dict[str, Any]) -> dict[str, Any]:
    """503 says the same as 200, in the same form, unless there are too many connections."""
    path = _get("Whether it can serve", done, _OPEN)
    too_many = path["get"]["responses"]["503"]["content"][JSON]["schema"]
    forms = {"anyOf": [done["content"][JSON]["schema"], too_many]}
    path["get"]["responses"]["503"] = {"description": "It can't.", "content": {JSON: {"schema": forms}}}
    return _open(path)


def _open(path: dict[str, Any]) -> dict[str, Any]:
    """`path`, which asks for no key."""
    path["get"]["security"] = []
    return path


def _refused(statuses: Iterable[int]) -> dict[str, Any]:
    answers = _answers({}, statuses)
    del answers["200"]
    return answers
