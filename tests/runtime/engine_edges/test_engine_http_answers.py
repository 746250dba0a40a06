"""Refusals name the field, the value and the rule; state endpoints say what probes and people ask."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from processes.scripted_core_server import MAX_MODEL_LEN, ScriptedCore, says, serve
from stageline_api.engine_http import EngineError, ErrorCode, Failed, ModelInfo
from stageline_api.health import EngineStatus, Phase

GOOD = {"request_id": "r1", "prompt": {"kind": "text", "text": "hello"}}


def ask(core: ScriptedCore, directory: Path, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """The answers to (method, path, httpx arguments), in turn."""

    async def run() -> list[httpx.Response]:
        async with serve(core, directory) as client:
            return [await client.request(method, path, **arguments) for method, path, arguments in requests]

    return asyncio.run(run())


def generate_answer(directory: Path, core: ScriptedCore, **arguments: Any) -> httpx.Response:
    [response] = ask(core, directory, ("POST", "/v1/generate", arguments))
    return response


CHAT_WITHOUT_ROLE = {"kind": "chat", "messages": [{"content": "x"}]}
CASES = [
    pytest.param({"content": b"{"}, None, "can't be read", id="malformed"),
    pytest.param({"content": b""}, None, "can't be read", id="no-body"),
    pytest.param({"content": b"\xff\xfe"}, None, "can't be read", id="not-utf8"),
    pytest.param({"content": b'{"request_id": "a\\ud800"}'}, None, "can't be read", id="surrogate"),
    pytest.param({"content": b"[]"}, None, "can't be read", id="not-an-object"),
    pytest.param({"json": {"request_id": "r"}}, "prompt", "prompt: Object missing required field", id="no-prompt"),
    pytest.param({"json": GOOD | {"request_id": ""}}, "request_id", "request_id: .*not ''", id="empty-id"),
    pytest.param(
        {"json": GOOD | {"sampling": {"temperature": 9}}},
        "temperature",
        r"sampling\.temperature: .*<= 2.0, not 9",
        id="temperature",
    ),
    pytest.param(
        {"json": GOOD | {"prompt": CHAT_WITHOUT_ROLE}},
        "messages",
        r"prompt\.messages\[0\]\.role: Object missing required field",
        id="role",
    ),
    pytest.param(
        {"json": GOOD | {"prompt": {"kind": "tokens", "token_ids": ["x"]}}},
        "prompt",
        r"prompt\.token_ids\[0\]: .*not 'x'",
        id="token",
    ),
    pytest.param(
        {"json": GOOD | {"prompt": {"kind": "song"}}}, "prompt", "prompt.kind: Invalid value 'song'", id="prompt-kind"
    ),
    pytest.param({"json": GOOD | {"sampling": {"stop": [""]}}}, "stop", "must not be empty", id="empty-stop"),
    pytest.param(
        {"json": GOOD | {"prompt": {"kind": "tokens", "token_ids": [300]}}}, "prompt", "Token id 300", id="vocabulary"
    ),
]


@pytest.mark.parametrize(("arguments", "param", "words"), CASES)
def test_bad_requests_are_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], param: str | None, words: str
) -> None:
    core = ScriptedCore(says("never"))
    response = generate_answer(tmp_path, core, **arguments)
    assert response.status_code == 400, response.text
    error = EngineError.from_json(response.content)
    assert (error.code, error.param, error.retry_after_seconds) == (ErrorCode.INVALID_VALUE, param, None)
    assert re.search(words, error.message), error.message
    assert core.submitted == []


def test_a_prompt_longer_than_the_context_names_both_numbers(tmp_path: Path) -> None:
    request = GOOD | {"prompt": {"kind": "text", "text": "x" * (MAX_MODEL_LEN + 1)}}
    response = generate_answer(tmp_path, ScriptedCore(says("never")), json=request)
    error = EngineError.from_json(response.content)
    assert (response.status_code, error.code) == (400, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    assert f"{MAX_MODEL_LEN + 1} tokens" in error.message
    assert f"at most {MAX_MODEL_LEN - 1}" in error.message


def test_a_body_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    response = generate_answer(tmp_path, ScriptedCore(says("never")), content=b" " * 300_000)
    assert response.status_code == 413
    assert "larger than 200000 bytes" in EngineError.from_json(response.content).message


@pytest.mark.parametrize(
    ("phase", "code", "retry_after"),
    [(Phase.LOADING, ErrorCode.NOT_READY, "5"), (Phase.DRAINING, ErrorCode.DRAINING, "2")],
)
def test_the_cores_refusal_says_when_to_try_again(
    tmp_path: Path, phase: Phase, code: ErrorCode, retry_after: str
) -> None:
    response = generate_answer(tmp_path, ScriptedCore(says("never"), phase=phase), json=GOOD)
    assert (response.status_code, response.headers["retry-after"]) == (503, retry_after)
    assert EngineError.from_json(response.content).code is code


@pytest.mark.parametrize(
    ("header", "body_id", "echoed"),
    [
        pytest.param({}, "from-body", "from-body", id="body"),
        pytest.param({"X-Request-Id": "from-header"}, "from-body", "from-header", id="header"),
        pytest.param({}, "a\r\nSet-Cookie: b", None, id="injection"),
        pytest.param({}, "é", None, id="not-ascii"),
    ],
)
def test_the_request_id_is_echoed_when_it_is_plain(
    tmp_path: Path, header: dict[str, str], body_id: str, echoed: str | None
) -> None:
    response = generate_answer(tmp_path, ScriptedCore(says("a")), json=GOOD | {"request_id": body_id}, headers=header)
    assert response.status_code == 200
    assert response.headers.get("x-request-id") == echoed
    assert "set-cookie" not in response.headers


def test_a_refusal_carries_the_request_id_too(tmp_path: Path) -> None:
    response = generate_answer(tmp_path, ScriptedCore(says("a")), content=b"{", headers={"X-Request-Id": "from-header"})
    assert response.headers["x-request-id"] == "from-header"


@pytest.mark.parametrize(
    ("phase", "health", "ready"),
    [(Phase.LOADING, 200, 503), (Phase.READY, 200, 200), (Phase.DRAINING, 200, 503), (Phase.FAILED, 503, 503)],
)
def test_probes_follow_the_phase(tmp_path: Path, phase: Phase, health: int, ready: int) -> None:
    answers = ask(
        ScriptedCore(says(""), phase=phase),
        tmp_path,
        *(("GET", path, {}) for path in ("/healthz", "/readyz", "/status")),
    )
    assert [answer.status_code for answer in answers] == [health, ready, 200]
    assert {EngineStatus.model_validate_json(answer.content).phase for answer in answers} == {phase}


def test_info_and_metrics(tmp_path: Path) -> None:
    info, metrics = ask(
        ScriptedCore(says("")), tmp_path, ("GET", "/v1/info", {}), ("GET", "/metrics", {"headers": {"accept": "a/b"}})
    )
    assert ModelInfo.from_json(info.content).max_model_len == MAX_MODEL_LEN
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; asked=a/b"
    assert "stageline_test 7.0" in metrics.text


def test_after_a_drain_new_requests_are_refused(tmp_path: Path) -> None:
    drain, again, generate = ask(
        ScriptedCore(says("never")),
        tmp_path,
        ("POST", "/v1/drain", {}),
        ("POST", "/v1/drain", {}),
        ("POST", "/v1/generate", {"json": GOOD}),
    )
    assert (drain.status_code, again.status_code, generate.status_code) == (202, 202, 503)
    assert EngineStatus.model_validate_json(drain.content).phase is Phase.DRAINING


def test_what_a_web_page_sends_is_refused(tmp_path: Path) -> None:
    """A form's content type needs no consent of this port, and a page may give its own name to this address."""
    body = json.dumps(GOOD)
    answers = ask(
        ScriptedCore(says("never")),
        tmp_path,
        ("POST", "/v1/generate", {"content": body, "headers": {"content-type": "text/plain"}}),
        ("POST", "/v1/generate", {"json": GOOD, "headers": {"origin": "http://evil.example"}}),
        ("POST", "/v1/drain", {"headers": {"origin": "null"}}),
        ("GET", "/status", {"headers": {"host": "evil.example"}}),
        ("GET", "/status", {}),
    )
    assert [one.status_code for one in answers] == [403, 403, 403, 403, 200]
    assert EngineStatus.model_validate_json(answers[-1].content).phase is Phase.READY


def test_a_bug_shows_a_sentence_and_no_traceback(tmp_path: Path) -> None:
    class BrokenCore(ScriptedCore):
        def info(self) -> ModelInfo:
            raise ValueError("a secret of the inside")

    [response] = ask(BrokenCore(says("")), tmp_path, ("GET", "/v1/info", {}))
    assert response.status_code == 500
    message = "The engine failed on this request; its log says why."
    assert response.json() == msgspec.to_builtins(Failed(message=message))


def test_fields_that_this_version_does_not_know_are_ignored(tmp_path: Path) -> None:
    newer = {"of_a_newer_gateway": {"is": [1]}}
    asked = GOOD | newer | {"prompt": {"kind": "text", "text": "hello"} | newer, "sampling": {"max_tokens": 3} | newer}
    response = generate_answer(tmp_path, ScriptedCore(says("ok")), json=asked)
    assert response.status_code == 200, response.text
    assert json.loads(response.text.splitlines()[-1])["type"] == "finished"


def test_unknown_paths_and_wrong_methods_are_answered_in_the_same_form(tmp_path: Path) -> None:
    missing, wrong = ask(ScriptedCore(says("x")), tmp_path, ("GET", "/nowhere", {}), ("GET", "/v1/generate", {}))
    assert (missing.status_code, wrong.status_code) == (404, 405)
    unknown = EngineError.from_json(missing.content)
    assert unknown.code is ErrorCode.NOT_FOUND
    assert "'/nowhere'" in unknown.message
    not_allowed = EngineError.from_json(wrong.content)
    assert not_allowed.code is ErrorCode.METHOD_NOT_ALLOWED
    assert "GET" in not_allowed.message
    assert wrong.headers["allow"] == "POST"
