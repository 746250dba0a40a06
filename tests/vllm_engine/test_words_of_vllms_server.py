"""What is said to vLLM's server and read of it: bodies, lines however they are split, figures, broken answers."""

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.engine_http import MAX_TOP_LOGPROBS
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.plan_bus.prompt_report import unpacked
from stageline_vllm.engine.answer_progress import AnswerProgress
from stageline_vllm.engine.generate_words import (
    VllmAnswerError,
    error_words,
    generate_body,
    read_event,
    refusal_of,
    reported_logprobs,
)
from stageline_vllm.engine.prompt_words import prompt_body, read_prompt
from stageline_vllm.engine.response_reader import ResponseError, ResponseReader
from stageline_vllm.engine.vllm_figures import SAMPLE_NAMES, VllmFigures, read_figures
from stageline_vllm.request_draws import KEY, read_draws
from stageline_vllm.seams import SEAMS
from stageline_vllm.serve_words import NEEDED_WORDS

RECORDED = Path(__file__).parent / "recorded"
"""Answers of vLLM 0.32.0 itself."""
GREEDY = RequestSampling(temperature=0.0, num_prompt_tokens=3)
LINES = [b'data: {"choices": []}', b"data: " + b"x" * 300, b"data: [DONE]"]
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%b\r\n" % (len(line) + 2, line + b"\n\n") for line in LINES
)


def admitted(sampling: RequestSampling = GREEDY, *, generated: tuple[int, ...] = (), **fields: Any) -> AdmittedRequest:
    known: dict[str, Any] = {"max_new_tokens": 10, "stop_token_ids": frozenset({2, 7})} | fields
    return AdmittedRequest(
        request_id="a", prompt_token_ids=(5, 6, 9), sampling=sampling, generated_token_ids=generated, **known
    )


def body(request: AdmittedRequest) -> dict[str, Any]:
    return dict(json.loads(generate_body(request, 4, {2})))


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def read(parts: list[bytes], *, ends: bool = False) -> tuple[ResponseReader, list[bytes]]:
    reader = ResponseReader()
    lines = [line for part in parts for line in reader.feed(part)]
    return reader, lines + (reader.end() if ends else [])


@given(cuts=st.lists(st.integers(0, 10_000), max_size=30))
def test_lines_are_the_same_however_chunks_are_split(cuts: list[int]) -> None:
    reader, lines = read(split(CHUNKED + b"0\r\n\r\n", cuts))
    assert (reader.status, lines, reader.is_complete) == (200, LINES, True)


@given(cuts=st.lists(st.integers(0, 10_000), max_size=9))
def test_bodies_of_a_known_length_and_up_to_the_end_are_read_too(cuts: list[int]) -> None:
    told = b'HTTP/1.1 404 Not Found\r\ncontent-length: 13\r\n\r\n{"error": {}}'
    reader, lines = read(split(told, cuts))
    assert (reader.status, lines, reader.is_complete) == (404, [b'{"error": {}}'], True)
    open_ended = b"HTTP/1.1 500 Oops\r\nconnection: close\r\n\r\nfirst\nrest"
    reader, lines = read(split(open_ended, cuts), ends=True)
    assert (reader.status, lines, reader.is_complete) == (500, [b"first", b"rest"], True)


@pytest.mark.parametrize("cut", range(0, len(CHUNKED), 37))
def test_a_broken_answer_is_never_complete(cut: int) -> None:
    reader, _ = read([CHUNKED[:cut]], ends=True)
    assert not reader.is_complete


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 9_000_000,
    ],
)
def test_what_is_no_such_response_is_refused(data: bytes) -> None:
    with pytest.raises(ResponseError):
        ResponseReader().feed(data)


def test_a_salt_goes_where_vllm_keeps_its_cache_apart_by() -> None:
    assert "cache_salt" not in body(admitted())
    assert body(admitted(cache_salt="ours")) == body(admitted()) | {"cache_salt": "ours"}


def test_a_requests_priority_is_vllms_too() -> None:
    """It decides there who gives up KV blocks when they are short."""
    assert [body(admitted(priority=priority))["priority"] for priority in (-10, 0, 7)] == [-10, 0, 7]


def test_every_field_that_is_sent_is_listed_as_a_seam() -> None:
    """vLLM ignores what it doesn't know, so a name that it changes would be lost in silence."""
    listed = {seam.path.rpartition(":")[2]: set(seam.fields) for seam in SEAMS}
    drawn = RequestSampling(temperature=0.5, num_top_logprobs=2)
    told = msgspec.structs.replace(drawn, num_top_prompt_logprobs=2)
    about_prompt = dict(json.loads(prompt_body(admitted(told), 4)))
    for said in (body(admitted(drawn, cache_salt="ours", adapter="mine")), about_prompt):
        assert said.keys() <= listed["GenerateRequest"]
        assert said["sampling_params"].keys() <= listed["SamplingParams"]


def test_plain_greedy_requests_are_vllms_own() -> None:
    said = body(admitted(generated=(40, 41)))
    assert said["token_ids"] == [5, 6, 9, 40, 41]
    assert said["sampling_params"] == {
        "temperature": 0.0, "max_tokens": 8, "stop_token_ids": [2, 7], "ignore_eos": True, "detokenize": False,
    }  # fmt: skip
    assert (said["stream"], "model" in said) == (True, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.3, "seed": 2**63 - 1},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 0.1},
        {"logit_bias": ((3, -100.0),)},
        {"json_schema": "{}"},
        {"min_tokens": 3, "end_token_ids": (2, 7)},
        {"allowed_token_ids": (1, 2)},
        {"bad_words": ((4,),)},
    ],
)
def test_all_else_is_told_to_the_logits_processor_and_not_to_vllm(changed: dict[str, Any]) -> None:
    sampling = msgspec.structs.replace(GREEDY, **changed)
    said = body(admitted(sampling, generated=(40,)))["sampling_params"]
    draws = read_draws(said.pop("extra_args"))
    assert draws is not None
    assert draws.sampling == sampling
    assert draws.number == 4
    assert draws.eos_token_ids == ((2,) if sampling.json_schema else ())
    assert said == body(admitted(generated=(40,)))["sampling_params"]


def test_draws_of_another_version_are_not_read() -> None:
    assert read_draws(None) is read_draws({}) is read_draws({"other": 1}) is None
    with pytest.raises(ValueError, match="version 99"):
        read_draws({KEY: [99]})


def test_one_more_candidate_is_asked_for_than_reported_and_vllm_is_told_to_allow_it() -> None:
    most = msgspec.structs.replace(GREEDY, num_top_logprobs=MAX_TOP_LOGPROBS)
    asked = body(admitted(most))["sampling_params"]["logprobs"]
    assert asked == MAX_TOP_LOGPROBS + 1
    assert NEEDED_WORDS[NEEDED_WORDS.index("--max-logprobs") + 1] == str(asked)


@pytest.mark.parametrize(
    ("listed", "count", "expected"),
    [
        ([(8, -9.0), (1, -0.1), (2, -1.0)], 2, ((1, -0.1), (2, -1.0))),  # an unlikely token was drawn
        ([(1, -0.1), (2, -1.0), (3, -2.0)], 2, ((1, -0.1), (2, -1.0))),  # the likeliest
        ([(2, -1.0), (1, -0.1), (3, -2.0)], 2, ((1, -0.1), (2, -1.0))),  # the second
        ([(8, -9.0)], 0, ()),
    ],
)
def test_the_likeliest_are_reported_whatever_was_drawn(
    listed: list[tuple[int, float]], count: int, expected: tuple[tuple[int, float], ...]
) -> None:
    top = [{"token_id": token, "logprob": value, "rank": 1} for token, value in listed]
    content = [top[0] | {"top_logprobs": top}]
    event = read_event(b"data: " + json.dumps({"choices": [{"logprobs": {"content": content}}]}).encode())
    assert event is not None
    assert event.choices[0].logprobs is not None
    assert event.choices[0].logprobs.content is not None
    reported = reported_logprobs(event.choices[0].logprobs.content[0], count)
    assert (reported.logprob, reported.top) == (listed[0][1], expected)


def events(*choices: dict[str, Any], **fields: Any) -> Any:
    event = read_event(b"data: " + json.dumps({"choices": choices} | fields).encode())
    assert event is not None
    return event


def test_several_tokens_in_one_event_end_where_the_answer_does() -> None:
    progress = AnswerProgress(admitted())
    assert [new.token for new in progress.take(events({"token_ids": [30, 31, 7], "finish_reason": "stop"}))] == [30, 31]
    progress.take(events(usage={"prompt_tokens_details": {"cached_tokens": 5}}))
    last = progress.end()
    assert last is not None
    assert (last.token, last.stopped, progress.cached_tokens) == (7, True, 3)
    with pytest.raises(VllmAnswerError, match="went on"):
        progress.take(events({"token_ids": [8]}))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'data: {"choices": [{"token_ids": [9], "finish_reason": "length"}]}', "by itself: length"),
        (b'data: {"choices": [{"token_ids": [], "finish_reason": "abort"}]}', "by itself: abort"),
        (b'data: {"error": {"message": "EngineCore died", "code": 500}}', "EngineCore died"),
        (b'data: {"error": {}}', "does not say why"),
        (b"data: {", "can't be read"),
        (b'data: {"choices": "none"}', "can't be read"),
    ],
)
def test_an_answer_that_vllm_cuts_short_is_a_failure(line: bytes, told: str) -> None:
    progress = AnswerProgress(admitted())
    with pytest.raises(VllmAnswerError, match=told):
        progress.take(read_event(line))  # type: ignore[arg-type]  # none of them is the last line
    assert progress.end() is None


def test_left_out_log_probabilities_are_a_failure() -> None:
    progress = AnswerProgress(admitted(msgspec.structs.replace(GREEDY, num_top_logprobs=1)))
    with pytest.raises(VllmAnswerError, match="left out"):
        progress.take(events({"token_ids": [9]}))


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((RECORDED / f"{name}.json").read_text()))


def replayed(name: str, sampling: RequestSampling = GREEDY, **fields: Any) -> tuple[list[int], AnswerProgress]:
    """Tokens of a recorded stream, and where it left the answer."""
    progress = AnswerProgress(admitted(sampling, **fields))
    tokens = []
    for line in filter(None, recorded(name)["text"].split("\n")):
        event = read_event(line.encode())
        if event is not None:
            tokens += [new.token for new in progress.take(event)]
    last = progress.end()
    assert last is not None
    return [*tokens, last.token], progress


def test_recorded_answers_of_vllm_are_read() -> None:
    assert replayed("generate_stream_usage", max_new_tokens=4)[0] == [7042, 30, 198, 198]
    tokens, progress = replayed("stop_token", stop_token_ids=frozenset({30}))
    assert tokens == [7042, 30]
    last = progress.end()
    assert last is not None
    assert last.stopped


def test_recorded_log_probabilities_of_vllm_are_read() -> None:
    sampling = msgspec.structs.replace(GREEDY, num_top_logprobs=2)
    tokens, progress = replayed("generate_stream_logprobs", sampling, max_new_tokens=4)
    last = progress.end()
    assert len(tokens) == 4
    assert last is not None
    assert last.logprobs is not None
    assert last.logprobs.top[0] == (tokens[-1], last.logprobs.logprob)
    assert len(last.logprobs.top) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [("wrong_model", "`other` does not exist"), ("too_long", "longer than the maximum model length of 640")],
)
def test_recorded_refusals_of_vllm_are_told(name: str, words: str) -> None:
    answer = recorded(name)
    assert 400 <= answer["status"] < 500
    assert words in error_words([answer["text"].encode()])


@pytest.mark.parametrize(
    ("status", "is_about_request"),
    [(400, True), (404, True), (413, True), (422, True), (401, False), (403, False), (408, False), (409, False),
     (425, False), (429, False), (500, False), (502, False), (503, False)],
)  # fmt: skip
def test_only_what_was_asked_ends_a_request_for_good(status: int, is_about_request: bool) -> None:
    """Anything else another group may answer, so the gateway goes on there."""
    refusal = refusal_of(status, [b'{"error": {"message": "no"}}'])
    assert refusal.is_about_request is is_about_request
    assert refusal.words.startswith(f"({status}): no")


def test_a_server_that_wants_a_key_is_told_as_such() -> None:
    """vLLM's own body of a 401."""
    words = refusal_of(401, [b'{"error":"Unauthorized"}']).words
    assert "Unauthorized" in words
    assert "It wants another key than the engine's" in words


def test_a_recorded_abort_is_no_end_of_an_answer() -> None:
    line = recorded("aborted_stream")["last_events"].split("\n")[0].encode()
    with pytest.raises(VllmAnswerError, match="by itself: abort"):
        AnswerProgress(admitted()).take(read_event(line))  # type: ignore[arg-type]  # it is not the last line


def test_the_figures_have_names_that_vllm_has() -> None:
    known = set(json.loads((RECORDED / "metric_names.json").read_text()))
    needed = {name.removesuffix("_count") for name in SAMPLE_NAMES} | {"vllm:cache_config_info"}
    assert needed <= known


def test_refusals_are_shown_in_vllms_words() -> None:
    assert error_words([b'{"error": {"message": "too long"}}']) == "too long"
    assert error_words([b"<html>", b"no</html>"]) == "<html>\nno</html>"
    assert len(error_words([b"x" * 1000])) == 301


def test_figures_are_summed_over_vllms_engines_and_what_is_missing_is_nought() -> None:
    page = """# HELP vllm:kv_cache_usage_perc KV-cache usage.
vllm:cache_config_info{block_size="16",num_gpu_blocks="320",engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 3.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 40.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.2e+03
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
python_info 1.0
"""
    assert read_figures(page) == VllmFigures(0.25, 320, 40, 2, 1200, 64)
    assert read_figures("") == VllmFigures()


def recorded_prompt(**fields: Any) -> tuple[list[bytes], AdmittedRequest]:
    """vLLM's own answer about a prompt, and the request for it."""
    recorded = json.loads((RECORDED / "generate_logprobs.json").read_text())
    ids = tuple(recorded["request"]["body"]["token_ids"])
    sampling = msgspec.structs.replace(GREEDY, num_top_prompt_logprobs=1)
    request = AdmittedRequest(
        request_id="a", prompt_token_ids=ids, sampling=sampling, max_new_tokens=1, stop_token_ids=frozenset(), **fields
    )
    return [recorded["text"].encode()], request


def test_log_probabilities_of_a_prompt_are_read_as_vllm_writes_them() -> None:
    report, drawn = read_prompt(*recorded_prompt())
    found = list(unpacked(report, 0, report.num_tokens))
    assert (report.position, drawn) == (1, 7042)
    assert [one.rank for one in found] == [3077, 1, 2, 1]
    assert [one.logprob for one in found] == pytest.approx([-11.593955, -0.363161, -2.385694, -0.438654], abs=1e-5)
    assert [one.top[0][0] for one in found] == [29, 282, 260, 314], "the likeliest, whatever the prompt has"
    later, _ = read_prompt(*recorded_prompt(prompt_told=3))
    assert list(unpacked(later, 0, later.num_tokens)) == found[2:]


@pytest.mark.parametrize(
    "text",
    [
        '{"choices": [{"token_ids": [1]}]}',
        '{"choices": [{"token_ids": [1]}], "prompt_logprobs": [null]}',
        '{"choices": [{"token_ids": [1]}], "prompt_logprobs": [null, {}, {}, {}, {}]}',
        '{"choices": [], "prompt_logprobs": [null, null, null, null, null]}',
        '{"choices": 3}',
        "",
    ],
)
def test_an_answer_without_them_is_a_failure(text: str) -> None:
    _, request = recorded_prompt()
    with pytest.raises(VllmAnswerError, match=r"left out|can't be read"):
        read_prompt([text.encode()], request)
