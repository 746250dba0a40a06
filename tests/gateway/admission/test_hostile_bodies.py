"""Bodies made to cost: as large as they may be, and refused in a fixed time of the event loop and in bounded memory."""

import json
import socket
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from hostility.repeated_parts import BODY_BYTES, REPEATED
from processes.cpu_bounds import CpuBound
from processes.gateway_harness import MODEL, LongestTurn, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import Hold, Say, ScriptedEngine
from stageline_api.engine_http import (
    Admitted,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
    TopLogprob,
    UnreadableError,
)
from stageline_gateway.admission.body_sizes import (
    FEW,
    MOST_OBJECTS,
    BodyShape,
    check_shape,
    shape_of,
    shape_with_written,
)
from stageline_gateway.admission.request_body import parse_object
from stageline_gateway.errors import SHOWN_CHARACTERS, ApiError, shown
from stageline_gateway.openai_api.dialects.prepared import prepare_message, prepare_response
from stageline_gateway.openai_api.tokenize_requests import parse_detokenize, parse_tokenize
from stageline_gateway.openai_api.validation import parse_chat, parse_completion
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.strict_json import MAX_DEPTH
from stageline_runtime.engine.edge.http_errors import invalid_body

LOOP_SECONDS: Final = 0.05
"""Of CPU; a machine ten times slower than the one that this was measured on needs no more than it has."""
SLOW_MACHINE: Final = 10
TRIES: Final = 3
LONGEST_TURN_SECONDS: Final = 0.25
"""What the soak allows anybody's pause to be, here of CPU."""
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """One gateway for all that is refused before an engine is asked."""
    engine = ScriptedEngine()
    engine.start()
    with running_gateway(GatewaySettings(tmp_path_factory.mktemp("attacked") / "endpoints.json")) as gateway:
        gateway.serve(group(engine.url))
        yield gateway
    engine.stop()


@pytest.mark.parametrize("name", REPEATED)
def test_a_refusal_of_a_large_body_has_no_long_turn_of_the_loop(
    attacked: RunningGateway, name: str, cpu_bound: CpuBound
) -> None:
    """How much of the loop it has altogether is in `test_costs_of_attacks`.

    The shortest of several tries counts: Python collects its garbage in whatever turn it comes to.
    """
    path, body = REPEATED[name].path, REPEATED[name].body()
    turns = list[LongestTurn]()
    while not turns or not cpu_bound.holds(turns[-1].own_seconds, LOOP_SECONDS):
        assert len(turns) < TRIES, f"{name}: {[each.own_seconds for each in turns]} s for {len(body)} bytes"
        with attacked.longest_turn() as turn:
            refused = attacked.http.post(path, content=body, headers=JSON)
        assert refused.status_code == 400, refused.text
        assert len(refused.content) < 2000, refused.text
        turns.append(turn)
    # A thread may hold the interpreter's lock all through one call of a library.
    assert cpu_bound.holds(turns[-1].seconds, LONGEST_TURN_SECONDS), (
        f"{name}: {turns[-1].seconds:.3f} s for {len(body)} bytes"
    )


@pytest.mark.parametrize("name", REPEATED)
def test_a_refusal_of_a_large_body_holds_little_more_than_the_body(name: str) -> None:
    """Errors for every item would be a thousand times that."""
    path, body = REPEATED[name].path, REPEATED[name].body()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            _checked(path, body)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A list of numbers is there twice while it is checked.
    assert most_bytes < 9 * len(body), f"{name}: {most_bytes} bytes for {len(body)}"


def _checked(path: str, body: bytes) -> object:
    shape = shape_of(body)
    check_shape(shape)
    fields = parse_object(body)
    check_shape(shape_with_written(shape, fields))
    parse: Any = {
        "/tokenize": parse_tokenize,
        "/v1/chat/completions": lambda fields: parse_chat(fields, {}),
        "/v1/completions": lambda fields: parse_completion(fields, {}),
        "/detokenize": parse_detokenize,
        "/v1/responses": lambda fields: prepare_response(fields, strict=True),
        "/v1/messages": lambda fields: prepare_message(fields, strict=True),
    }[path]
    return parse(fields)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a",[]{}\\:', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='"{,\\', max_size=4), inner, max_size=5)
    ),
    max_leaves=40,
)


@given(VALUES)
def test_a_shape_counts_what_parsing_makes_and_nothing_inside_strings(value: Any) -> None:
    raw = to_json({"padding": [0] * FEW, "value": value})
    shape = shape_of(raw)
    assert shape.objects == 2 + objects_in(value)
    assert shape.values >= values_in(value) + FEW


def objects_in(value: Any) -> int:
    match value:
        case dict():
            return 1 + sum(map(objects_in, value.values()))
        case list():
            return 1 + sum(map(objects_in, value))
        case _:
            return 0


def values_in(value: Any) -> int:
    match value:
        case dict():
            return sum(map(values_in, value.values()))
        case list():
            return sum(map(values_in, value))
        case _:
            return 1


def test_text_full_of_marks_is_no_structure() -> None:
    """A prompt may be a megabyte of JSON or of code."""
    shape = shape_of(to_json({"model": MODEL, "prompt": '{"a": [1, 2, "x\\\\"], }' * 40_000}))
    assert (shape.objects, shape.values) == (1, 2)


def test_what_a_body_will_hold_is_counted_before_it_is_made(gateway: RunningGateway) -> None:
    """Eight thousand empty messages are a quarter of a megabyte, and become eight."""
    body = {"model": "absent", "messages": [{"role": "user", "content": ""}] * 8192}
    assert gateway.http.post("/v1/chat/completions", json=body).status_code == 404
    held = gateway.admin.get("/status").json()["bodies"]
    assert held["most_bytes"] > 8 * 1024 * 1024, held
    assert held["bytes"] == 0, held


def with_call(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


CODE = 'if (a[0] == {"b": [1, 2]}) { c(d, e, f); }' * 1000


def test_what_arguments_of_calls_become_is_counted_and_what_they_quote_is_not(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    """They are JSON inside of strings: four megabytes became a hundred, as often as requests were open."""
    user = {"role": "user", "content": "x"}
    for arguments, at_least, at_most in (
        (json.dumps({"a": [{}] * 10_000}), 10 * 1024 * 1024, 16 * 1024 * 1024),
        (json.dumps({"written": CODE}), 0, 1024 * 1024),
    ):
        before = gateway.admin.get("/status").json()["bodies"]["most_bytes"]
        body = {"model": MODEL, "messages": [user, with_call(arguments), user]}
        assert gateway.http.post("/v1/chat/completions", json=body).status_code == 200
        held = gateway.admin.get("/status").json()["bodies"]
        assert held["bytes"] == 0, held
        if at_least:
            assert at_least < held["most_bytes"] < at_most, held
        else:
            assert held["most_bytes"] == before, held
    assert len(engine.requests) == 2


def test_many_calls_that_quote_code_are_no_structure() -> None:
    """Each has few marks by itself, and all together more than a body may have."""
    calls = [with_call(json.dumps({"written": CODE[:2000]})) for _ in range(2000)]
    shape = shape_with_written(BodyShape(0, 0), {"messages": calls})
    assert shape.objects == 2000, shape
    check_shape(shape)


@pytest.mark.parametrize("name", ["guided_json", "structured_outputs"])
def test_a_schema_in_a_text_counts_as_the_objects_that_it_is_read_as(name: str) -> None:
    schema = json.dumps({"allOf": [{}] * 10_000})
    fields = {name: schema if name == "guided_json" else {"json": schema}}
    assert shape_with_written(BodyShape(0, 0), fields).objects >= 10_000


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_an_engines_long_answer_is_counted_as_it_comes_and_read_off_the_loop(
    tmp_path: Path, engine: ScriptedEngine, path: str, cpu_bound: CpuBound
) -> None:
    """A million ids are a few megabytes of JSON and fifty as objects; a text of one wide character is four times it."""
    ids = ",".join(str(300 + index) for index in range(500_000))
    answers = {
        "/tokenize": f'{{"token_ids": [{ids}], "max_model_len": 99}}',
        "/detokenize": json.dumps({"text": "\U0001f600" + "x" * 4_000_000}, ensure_ascii=False),
    }
    asked: dict[str, Any] = {"prompt": "x"} if path == "/tokenize" else {"tokens": [1]}
    engine.replies[f"POST /v1{path}"] = (200, answers[path])
    for room_bytes, status in ((128 * 1024 * 1024, 200), (16 * 1024 * 1024, 503)):
        settings = GatewaySettings(tmp_path / "endpoints.json", body_room_bytes=room_bytes)
        with running_gateway(settings) as gateway:
            gateway.serve(group(engine.url))
            before = gateway.loop_seconds()
            answered = gateway.http.post(path, json={"model": MODEL} | asked)
            spent = gateway.loop_seconds() - before
            assert answered.status_code == status, answered.text[:300]
            held = gateway.admin.get("/status").json()["bodies"]
            assert held["bytes"] == 0, held
            if status == 200:
                assert held["most_bytes"] > 8 * 3_000_000, held
                assert len(answered.content) > 3_000_000
            else:
                assert answered.json()["error"]["code"] == "body_room"
                assert held["most_bytes"] <= room_bytes, held
            assert cpu_bound.holds(spent, LOOP_SECONDS * SLOW_MACHINE), f"{spent:.3f} s of the loop"


def test_one_more_object_than_allowed_is_refused_by_name() -> None:
    with pytest.raises(ApiError, match="32769 objects and lists; at most 32768") as refused:
        check_shape(shape_of(b"[" + b"{}," * MOST_OBJECTS + b"1]"))
    assert (refused.value.status, refused.value.code) == (400, "body_too_complex")


@pytest.mark.parametrize("value", [[[1] * 3_000_000], {"a": {"b": ["x" * 4_000_000]}}, "é" * 4_000_000, 10**4000])
def test_a_value_is_shown_without_being_written_out(value: object) -> None:
    tracemalloc.start()
    try:
        text = shown(value)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(text) <= SHOWN_CHARACTERS + 1
    assert most_bytes < 100_000


@pytest.mark.parametrize("end", ["1", "1e999"])
def test_a_large_number_is_looked_for_without_a_path_for_each_value(end: str) -> None:
    """A long name above a long list: a path for each value would be their product, some 16 GiB."""
    body = f'{{"prompt": "1e100", "x": {{"{"k" * 200_000}": [{"0," * 100_000}{end}]}}}}'.encode()
    named = []
    tracemalloc.start()
    try:
        parse_object(body)
    except ApiError as refused:
        named.append(refused.param)
    finally:
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert named == ([] if end == "1" else ["x." + "k" * 198 + "…"])
    assert most_bytes < 8 * len(body), f"{most_bytes} bytes for {len(body)}"


@pytest.mark.parametrize(
    "rest", [b", x]}", b"," + b"[" * 5000 + b"]" * 5001 + b"}", b"," + b"[" * 900 + b"]" * 901 + b"}"]
)
def test_what_is_wrong_behind_a_large_number_is_no_failure_of_the_gateway(rest: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_object(b'{"a": [1e999' + rest)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("levels", [MAX_DEPTH, 100_000])
def test_a_body_is_nested_to_a_bounded_depth(levels: int) -> None:
    assert parse_object(b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}")
    with pytest.raises(ApiError, match="nested deeper than 200 levels"):
        parse_object(b'{"a":' + b"[" * levels + b"]" * levels + b"}")


def test_the_engine_stops_at_the_first_wrong_id_too() -> None:
    body = b'{"request_id":"a","prompt":{"kind":"tokens","token_ids":[' + b'"x",' * 1_000_000 + b"1]}}"
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableError) as refused:
            GenerateRequest.from_json(body)
        refusal = invalid_body(refused.value, body)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refusal.param == "prompt"
    assert refusal.message.startswith("prompt.token_ids[0]: "), refusal.message
    assert most_bytes < 8 * len(body)


@pytest.mark.parametrize("stop", ["x" * BODY_BYTES, ["ok", "x" * 257]])
def test_a_stop_string_is_short(gateway: RunningGateway, stop: Any, cpu_bound: CpuBound) -> None:
    """An automaton of four million characters would be built between two tokens of everybody else."""
    body = to_json({"model": MODEL, "prompt": "x", "stop": stop})
    before = gateway.loop_seconds()
    refused = gateway.http.post("/v1/completions", content=body[: BODY_BYTES + 1024], headers=JSON)
    spent = gateway.loop_seconds() - before
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] in ("stop", "stop[1]"), refused.text
    assert "256 characters" in refused.json()["error"]["message"]
    assert cpu_bound.holds(spent, LOOP_SECONDS * SLOW_MACHINE), f"{spent:.3f} s"


def many_tokens(count: int, top: int) -> list[Any]:
    """An answer of `count` tokens with `top` alternatives each."""
    other = [TopLogprob(token_id=index, bytes=(97 + index, 98, 99, 100), logprob=-1.25) for index in range(top)]
    one = TokenLogprob(token_id=1, bytes=(97, 98, 99, 100), logprob=-0.5, top_logprobs=tuple(other))
    deltas = [Say(Delta(text="abcd", token_ids=(1,), logprobs=(one,))) for _ in range(count)]
    end = Finished(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=count)
    return [Say(Admitted(prompt_tokens=1)), *deltas, Hold(), Say(end)]


def test_log_probabilities_of_a_whole_answer_are_held_as_json_and_counted(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    engine.script = lambda _: many_tokens(500, 20)
    body = {"model": MODEL, "prompt": "x", "logprobs": 20, "max_tokens": 500}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gateway.http.post, "/v1/completions", json=body)
        held = gateway.admin.get("/status").json()["bodies"]
        eventually(lambda: held_bytes(gateway) > 500 * 20 * 10, lambda: f"not counted: {held_bytes(gateway)}")
        eventually(lambda: len(engine.requests) == 1, "asked")
        engine.release()
        answer = asked.result()
    held = gateway.admin.get("/status").json()["bodies"]
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert [len(values) for values in logprobs.values()] == [500] * 4
    assert logprobs["text_offset"] == list(range(0, 2000, 4))
    assert held["bytes"] == 0
    assert len(answer.content) / 2 < held["most_bytes"] < 4 * len(answer.content), (held, len(answer.content))


def test_a_whole_answer_counts_until_its_client_has_taken_it(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    """Not only until it is made: who doesn't read it has it kept here."""
    piece, end = (
        Delta(text="x" * 1_000_000, token_ids=(1,)),
        Finished(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=16),
    )
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), *[Say(piece)] * 16, Say(end)]
    asked = to_json({"model": MODEL, "prompt": "x"})
    url = httpx.URL(gateway.url)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(60)
        raw.connect((url.host, url.port or 0))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(asked)}\r\n"
        raw.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + asked)
        begun = raw.recv(1000)
        assert begun.startswith(b"HTTP/1.1 200"), begun
        status = gateway.admin.get("/status").json()
        assert status["open_requests"] == 0, "its place is free"
        assert status["bodies"]["bytes"] > 16_000_000, status
        rest = b"".join(iter(lambda: raw.recv(1 << 20), b""))
        assert len(rest) > 15_000_000
    eventually(lambda: held_bytes(gateway) == 0, lambda: f"not given back: {held_bytes(gateway)}")


def held_bytes(gateway: RunningGateway) -> int:
    return int(gateway.admin.get("/status").json()["bodies"]["bytes"])


def test_an_answer_that_outgrows_the_room_is_refused(tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.script = lambda _: many_tokens(500, 20)
    with running_gateway(GatewaySettings(tmp_path / "endpoints.json", body_room_bytes=100_000)) as gateway:
        gateway.serve(group(engine.url))
        body = {"model": MODEL, "prompt": "x", "logprobs": 20}
        refused = gateway.http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "body_room")
        eventually(lambda: held_bytes(gateway) == 0, "it gave everything back")


def test_copies_of_a_prompt_for_many_choices_are_counted_before_they_are_made(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    asked = to_json({"model": MODEL, "n": 128, "prompt": "x" * (BODY_BYTES - 1024)})
    refused = gateway.http.post("/v1/completions", content=asked, headers=JSON)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n"), refused.text
    assert "128 choices of a body of" in refused.json()["error"]["message"]
    assert engine.requests == []
    fitting = to_json({"model": MODEL, "n": 8, "prompt": "x" * 100_000})
    assert gateway.http.post("/v1/completions", content=fitting, headers=JSON).status_code == 200
    held = gateway.admin.get("/status").json()["bodies"]
    assert 800_000 < held["most_bytes"] < 8 * BODY_BYTES, held


def test_many_long_answers_are_searched_for_calls_beside_the_loop(
    gateway: RunningGateway, engine: ScriptedEngine, cpu_bound: CpuBound
) -> None:
    """Letter by letter, for all choices at once when the last has ended."""
    text = json.dumps([{"name": "f", "arguments": {"a": "x" * 400_000}}])
    end = Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Say(Delta(text=text, token_ids=(1,))), Say(end)]
    tool = {"type": "function", "function": {"name": "f"}}
    user = {"role": "user", "content": "x"}
    body = {"model": MODEL, "messages": [user], "n": 16, "tools": [tool], "tool_choice": "required"}
    gateway.http.get("/healthz")
    with gateway.longest_turn() as turn:
        answered = gateway.http.post("/v1/chat/completions", json=body)
    assert answered.status_code == 200, answered.text[:300]
    calls = [choice["message"]["tool_calls"] for choice in answered.json()["choices"]]
    assert [len(each) for each in calls] == [1] * 16
    assert cpu_bound.holds(turn.own_seconds, LONGEST_TURN_SECONDS), f"{turn.own_seconds:.3f} s"


@pytest.mark.parametrize("choices", [30, 128])
def test_choices_of_a_large_prompt_begin_one_after_the_other(
    gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, choices: int, cpu_bound: CpuBound
) -> None:
    """Each is named, written and sent by itself; what they need together would be a pause for everybody else."""
    gateway.serve(group(engine.url), group(other_engine.url, 1))
    body = to_json({"model": MODEL, "n": choices, "prompt": "x" * (60 * 1024 * 1024 // choices)})
    with gateway.longest_turn() as turn:
        answered = gateway.http.post("/v1/completions", content=body, headers=JSON)
    assert answered.status_code == 200, answered.text[:300]
    assert len(engine.requests) + len(other_engine.requests) == choices
    assert cpu_bound.holds(turn.own_seconds, LONGEST_TURN_SECONDS / 2), f"{turn.own_seconds:.3f} s"


@pytest.mark.parametrize("streams", [True, False])
def test_a_large_request_that_the_answer_repeats_hardly_costs_the_loop(
    gateway: RunningGateway, engine: ScriptedEngine, streams: bool, cpu_bound: CpuBound
) -> None:
    """A response repeats its instructions: three times in a stream, six bytes for each of its characters: 37 MB.

    Writing them takes most of that; encoding takes a sixth, with the interpreter locked, so a thread would not help.
    """
    body = to_json({"model": MODEL, "instructions": "é" * (BODY_BYTES // 2 - 512), "input": "x", "stream": streams})
    gateway.http.get("/healthz")
    before = gateway.loop_seconds()
    answer = gateway.http.post("/v1/responses", content=body, headers=JSON)
    spent = gateway.loop_seconds() - before
    assert answer.status_code == 200, answer.text[:300]
    assert len(engine.requests) == 1
    assert answer.content.count(b"\\u00e9") == (3 if streams else 1) * (BODY_BYTES // 2 - 512)
    assert cpu_bound.holds(spent, LOOP_SECONDS * SLOW_MACHINE), f"{spent:.3f} s of the loop"
