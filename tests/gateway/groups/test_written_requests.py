"""A request as it is written for the engine is read there as what it was, whatever it says."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from stageline_api.engine_http import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    ToolFunction,
)

TEXT = st.text(max_size=8)
WORD = st.text(min_size=1, max_size=8)
SMALL = st.integers(0, 20)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
MESSAGE = st.builds(
    ChatMessage,
    role=WORD,
    content=TEXT,
    tool_calls=st.lists(st.builds(ToolCall, id=WORD, name=WORD, arguments=OBJECT), max_size=2).map(tuple),
    tool_call_id=st.none() | WORD,
    name=st.none() | WORD,
    reasoning=st.none() | TEXT,
    is_content_null=st.booleans(),
)
TOOL = st.builds(ToolFunction, name=WORD, description=st.none() | TEXT, parameters=OBJECT)
CHAT = st.builds(
    ChatPrompt,
    messages=st.lists(MESSAGE, min_size=1, max_size=3).map(tuple),
    tools=st.lists(TOOL, max_size=2).map(tuple),
    tools_guided=st.booleans(),
    add_generation_prompt=st.booleans(),
    continue_final_message=st.booleans(),
    template_arguments=st.dictionaries(
        WORD, TEXT | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.none(), max_size=3
    ),
    reasoning_effort=st.none() | TEXT,
)
PENALTY = st.floats(-2, 2).map(lambda drawn: drawn + 0.0)
"""Never -0.0, which is left out as 0.0 is."""
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.none() | st.floats(0, 2),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    top_k=st.none() | SMALL,
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.none() | st.floats(0.01, 100),
    frequency_penalty=PENALTY,
    presence_penalty=PENALTY,
    logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**63 - 1),
    choice=SMALL,
    top_logprobs=st.none() | SMALL,
    prompt_logprobs=st.none() | SMALL,
    prompt_told=st.none() | SMALL,
    lists_stop_token=st.none() | st.booleans(),
    prompt_only=st.none() | st.booleans(),
    max_tokens=st.none() | st.integers(1, 9),
    json_schema=st.none() | st.just('{"type":"object"}'),
    regex=st.none() | WORD,
    grammar=st.none() | WORD,
    min_tokens=SMALL,
    allowed_token_ids=IDS,
    bad_words=st.lists(WORD, max_size=2).map(tuple),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    stop_token_ids=IDS,
    ignore_eos=st.booleans(),
)
PREFIX = st.tuples(st.text("0123456789abcdef", min_size=12, max_size=12), st.floats(0, 1, exclude_min=True))
REQUESTS = st.builds(
    GenerateRequest,
    request_id=WORD,
    prompt=CHAT
    | st.builds(TextPrompt, text=TEXT)
    | st.builds(TokenPrompt, token_ids=st.lists(st.integers(), min_size=1, max_size=4).map(tuple)),
    sampling=SAMPLING | st.just(SamplingParams()),
    generated_token_ids=IDS,
    generated_characters=st.none() | SMALL,
    adapter=st.none() | WORD,
    priority=st.integers(-1000, 1000),
    cache_salt=st.none() | WORD,
    prefixes=st.lists(PREFIX, max_size=2).map(tuple),
    client_request_id=st.none() | TEXT,
    traceparent=st.none() | TEXT,
    tracestate=st.none() | TEXT,
)


@given(REQUESTS)
def test_the_engine_reads_what_was_asked(request: GenerateRequest) -> None:
    line = request.to_json()
    read = GenerateRequest.from_json(line)
    assert read == request
    assert read.to_json() == request.to_json()  # 1 is equal to 1.0, and to True
    assert b"\n" not in line


@given(REQUESTS, st.integers(0, 9))
def test_so_it_does_of_a_request_that_was_changed_since_it_was_made(request: GenerateRequest, told: int) -> None:
    sampling = structs.replace(request.sampling, prompt_told=told, choice=told, prompt_logprobs=None)
    changed = structs.replace(request, request_id="r.2", priority=0, sampling=sampling)
    assert GenerateRequest.from_json(changed.to_json()) == changed


def test_what_is_the_default_is_not_written() -> None:
    request = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"), sampling=SamplingParams(seed=3, top_k=None))
    assert request.to_json() == b'{"request_id":"r","prompt":{"kind":"text","text":"x"},"sampling":{"seed":3}}'
