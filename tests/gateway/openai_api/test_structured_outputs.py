"""vLLM's guides of an answer's text, under their newer and older names, as the engine gets them."""

import json
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import ScriptedEngine
from stageline_api.engine_http import REGEX_MARK, ChatPrompt, SamplingParams

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
SCHEMA = {"type": "integer"}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("extra", "schema", "regex"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA, None),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA, None),
        ({"structured_outputs": {"json": "true"}}, True, None),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}, None),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, None, "a+"),
        ({"structured_outputs": {"choice": ["yes", "no.", "a|b c"]}}, None, "yes|no\\.|a\\|b c"),
        ({"guided_json": SCHEMA}, SCHEMA, None),
        ({"guided_regex": "a+", "guided_json": None}, None, "a+"),
        ({"guided_choice": ["a", "b"]}, None, "a|b"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_guides_reach_the_engine(
    gateway: RunningGateway, engine: ScriptedEngine, path: str, extra: dict[str, Any], schema: Any, regex: str | None
) -> None:
    answered = gateway.http.post(path, json=BODIES[path] | extra)
    assert answered.status_code == 200, answered.text
    sampling = engine.requests[0].sampling
    assert (sampling.json_schema and json.loads(sampling.json_schema), sampling.regex) == (schema, regex)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "extra", [{"guided_grammar": "root ::= [ab]"}, {"structured_outputs": {"grammar": "root ::= [ab]"}}]
)
def test_grammars_reach_the_engine(
    gateway: RunningGateway, engine: ScriptedEngine, path: str, extra: dict[str, Any]
) -> None:
    assert gateway.http.post(path, json=BODIES[path] | extra).status_code == 200
    assert engine.requests[0].sampling == SamplingParams(
        grammar="root ::= [ab]",
        seed=engine.requests[0].sampling.seed,
        max_tokens=engine.requests[0].sampling.max_tokens,
    )


@pytest.mark.parametrize("path", BODIES)
def test_what_the_answer_must_not_hold_reaches_the_engine(
    gateway: RunningGateway, engine: ScriptedEngine, path: str
) -> None:
    extra = {
        "min_tokens": 3,
        "bad_words": ["never"],
        "allowed_token_ids": [4, 5],
        "max_tokens": 9,
        "cache_salt": "ours",
    }
    assert gateway.http.post(path, json=BODIES[path] | extra).status_code == 200
    sampling = engine.requests[0].sampling
    assert (sampling.min_tokens, sampling.bad_words, sampling.allowed_token_ids) == (3, ("never",), (4, 5))
    assert engine.requests[0].cache_salt == "ours"
    nothing = {"min_tokens": 0, "bad_words": None, "allowed_token_ids": None, "cache_salt": None}
    assert gateway.http.post(path, json=BODIES[path] | nothing).status_code == 200
    sampling = engine.requests[1].sampling
    assert (sampling.min_tokens, sampling.bad_words, sampling.allowed_token_ids) == (0, (), ())


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 32769}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["."] * 1025}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"guided_choice": [""]}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"choice": ["." * 20000]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {"enum": ["x" * 70000]}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "regex:(a|b)*"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
        ({"guided_json": "{"}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "x" * 32769}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"guided_grammar": "x", "guided_regex": "a"}, "guided_grammar"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": "3"}, "min_tokens"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["x" * 129]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1] * 16385}, "allowed_token_ids"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_what_can_not_guide_is_refused_by_name(
    gateway: RunningGateway, engine: ScriptedEngine, extra: dict[str, Any], param: str
) -> None:
    answered = gateway.http.post("/v1/chat/completions", json=CHAT | extra)
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, param), answered.text
    assert engine.requests == []


def test_an_engine_takes_no_expression_for_a_schema() -> None:
    with pytest.raises(ValueError, match="can't begin with 'regex:'"):
        SamplingParams(json_schema=REGEX_MARK + "a")


def test_a_last_message_can_be_continued(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    turns = [*CHAT["messages"], {"role": "assistant", "content": "It is"}]
    for extra in ({"continue_final_message": True, "add_generation_prompt": False}, {"continue_final_message": True}):
        assert gateway.http.post("/v1/chat/completions", json=CHAT | {"messages": turns} | extra).status_code == 200
    gateway.http.post("/v1/chat/completions", json=CHAT | {"add_generation_prompt": False})
    prompts = [request.prompt for request in engine.requests]
    assert all(isinstance(prompt, ChatPrompt) for prompt in prompts)
    marks = [(p.add_generation_prompt, p.continue_final_message) for p in prompts if isinstance(p, ChatPrompt)]
    assert marks == [(False, True), (False, True), (False, False)]
