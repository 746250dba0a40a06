"""Every field that is taken changes what the engine is asked or how the answer is written, or is named as ignored.

The official client's own lists of parameters say which fields there are; the request types say which are taken.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import Struct, structs
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.checked_types import optional_fields
from stageline_gateway.openai_api.dialects.messages_request import MessagesRequest
from stageline_gateway.openai_api.dialects.prepared import prepare_message, prepare_response
from stageline_gateway.openai_api.dialects.responses_request import RESPONSES_KNOWN, ResponsesRequest
from stageline_gateway.openai_api.known_fields import CHAT_KNOWN, COMPLETION_KNOWN
from stageline_gateway.openai_api.request_types import ChatRequest, CompletionRequest
from stageline_gateway.openai_api.translate import Prepare, Prepared, prepare_chat, prepare_completion

CARRIED: dict[str, Any] = {
    "top_k": 3,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"1": 1.0},
    "seed": 7,
    "stop_token_ids": [1],
    "ignore_eos": True,
    "min_tokens": 2,
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "structured_outputs": {"regex": "x"},
    "cache_salt": "x",
}
TEMPLATE: dict[str, Any] = {"chat_template_kwargs": {"a": 1}}
SAMPLED = CARRIED | {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 2,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "prompt_logprobs": 1,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}
CUSTOM: dict[str, Any] = {"name": "f", "input_schema": {}}
USER: dict[str, Any] = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class Api:
    """How one API's fields are tried: each has a value in `values`, beside what it goes with."""

    prepare: Prepare
    model: type[Struct]
    body: Mapping[str, Any]
    values: Mapping[str, Any]
    beside: Mapping[str, Mapping[str, Any]]


APIS = {
    "chat": Api(
        prepare_chat,
        ChatRequest,
        {"model": "m", "messages": [USER]},
        SAMPLED
        | TEMPLATE
        | {
            "max_completion_tokens": 3,
            "reasoning_effort": "low",
            "add_generation_prompt": False,
            "continue_final_message": True,
            "response_format": {"type": "json_object"},
            "tools": [TOOL],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "logprobs": True,
            "top_logprobs": 2,
        },
        {
            "stream_options": {"stream": True},
            "tool_choice": {"tools": [TOOL]},
            "parallel_tool_calls": {"tools": [TOOL]},
            "top_logprobs": {"logprobs": True},
        },
    ),
    "completion": Api(
        prepare_completion,
        CompletionRequest,
        {"model": "m", "prompt": "x"},
        SAMPLED | {"echo": True, "logprobs": 1},
        {"stream_options": {"stream": True}},
    ),
    "response": Api(
        prepare_response,
        ResponsesRequest,
        {"model": "m", "input": "x"},
        CARRIED
        | TEMPLATE
        | {
            "stop": ["x"],
            "instructions": "x",
            "max_output_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.5,
            "stream": True,
            "tools": [FUNCTION],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "text": {"format": {"type": "json_object"}},
            "reasoning": {"effort": "low"},
            "user": "bo",
        },
        {"tool_choice": {"tools": [FUNCTION]}, "parallel_tool_calls": {"tools": [FUNCTION]}},
    ),
    "message": Api(
        prepare_message,
        MessagesRequest,
        {"model": "m", "max_tokens": 9, "messages": [USER]},
        CARRIED
        | TEMPLATE
        | {
            "system": "x",
            "stop_sequences": ["x"],
            "temperature": 0.5,
            "top_p": 0.5,
            "stream": True,
            "tools": [CUSTOM],
            "tool_choice": {"type": "none"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low"},
        },
        {"tool_choice": {"tools": [CUSTOM]}},
    ),
}


def effect(prepared: Prepared) -> object:
    """All that the rest of the gateway sees of a request."""
    asked, generate = prepared.asked, prepared.generate
    assert isinstance(asked, ChatRequest | CompletionRequest)
    seed = generate.sampling.seed if asked.seed is not None else None
    sampling = structs.replace(generate.sampling, seed=0)
    told = structs.replace(generate, request_id="r", sampling=sampling)
    shown = (asked.stream, asked.include_usage, asked.num_choices, asked.num_echoes, asked.wants_prompt)
    return told, seed, shown, prepared.ignored


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_each_field_has_an_effect_or_is_named(api: Api) -> None:
    optional = optional_fields(api.model).keys()
    assert api.values.keys() == optional, "a field without a value here"
    for name, value in api.values.items():
        beside = {**api.body, **api.beside.get(name, {})}
        assert effect(api.prepare(beside | {name: value}, False)) != effect(api.prepare(beside, False)), name


@pytest.mark.parametrize("api", ["response", "message"])
@pytest.mark.parametrize(
    "extra",
    [
        *({name: value} for name, value in (CARRIED | TEMPLATE).items()),
        {"guided_choice": ["a", "b"]},
        {"structured_outputs": {"json": {"type": "object"}}},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_what_is_beyond_an_api_has_the_same_effect_as_in_a_chat(api: str, extra: dict[str, Any]) -> None:
    def asked(of: str) -> tuple[object, ...]:
        prepared = APIS[of].prepare({**APIS[of].body, **extra}, False)
        generate = prepared.generate
        sampling = structs.replace(generate.sampling, seed=extra.get("seed"), max_tokens=None)
        return sampling, generate.prompt, generate.cache_salt, prepared.ignored

    assert asked(api) == asked("chat")


@pytest.mark.parametrize("api", ["response", "message"])
def test_a_wrong_value_of_one_is_refused_by_its_name(api: str) -> None:
    for extra, param in (
        ({"min_p": 2}, "min_p"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}, "guided_regex"),
    ):
        with pytest.raises(ApiError) as refused:
            APIS[api].prepare({**APIS[api].body, **extra}, False)
        assert refused.value.param is not None
        assert refused.value.param.startswith(param)


@pytest.mark.parametrize(
    ("params", "taken"),
    [
        (chat_params.CompletionCreateParamsBase, {*CHAT_KNOWN, *ChatRequest.__struct_fields__}),
        (
            completion_params.CompletionCreateParamsBase,
            {*COMPLETION_KNOWN, *CompletionRequest.__struct_fields__},
        ),
        (response_params.ResponseCreateParamsBase, {*RESPONSES_KNOWN, *ResponsesRequest.__struct_fields__}),
    ],
    ids=["chat", "completion", "response"],
)
def test_every_parameter_of_the_official_client_is_known_by_name(params: type, taken: Collection[str]) -> None:
    assert set(params.__annotations__) <= set(taken), set(params.__annotations__) - set(taken)
