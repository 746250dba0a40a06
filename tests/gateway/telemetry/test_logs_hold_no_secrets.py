"""What a gateway writes down, at its most talkative and with bugs in it, holds no key and no text of its clients."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from processes.gateway_harness import MODEL, eventually, group, write_endpoints
from processes.scripted_engine import Drop, Refuse, Say, ScriptedEngine, answer
from stageline_api.engine_http import Admitted, Delta, EngineError, ErrorCode

KEY = "sk-hidden-0123456789abcdef"
WRONG_KEY = "sk-wrong-0123456789abcdef"
PROMPT = "the heron's secret"
ANSWER = "a grey feather"
SECRETS = (KEY, WRONG_KEY, PROMPT, ANSWER, "heron", "feather", "hidden", "wrong-0123")


def test_no_key_and_no_text_is_logged(tmp_path: Path, engine: ScriptedEngine) -> None:
    keys, endpoints, log = tmp_path / "keys.yaml", tmp_path / "endpoints.json", tmp_path / "gateway.log"
    keys.write_text(f"keys: [{{name: one, key: {KEY}}}]")
    write_endpoints(endpoints, group(engine.url))
    options = ["--port", "0", "--endpoints", str(endpoints), "--keys", str(keys), "--access-log", "--log-level=debug"]
    with log.open("w") as output:
        command = [sys.executable, "-X", "dev", "-m", "stageline_gateway", *options]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        eventually(lambda: "listening on" in log.read_text() or process.poll() is not None, log.read_text)
        found = re.search(r"listening on (http://\S+)", log.read_text())
        assert found, log.read_text()
        make_trouble(found[1], engine, keys)
        eventually(lambda: "stay in force" in log.read_text(), log.read_text)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    written = log.read_text()
    assert r"\"POST /v1/chat/completions HTTP/1.1\" 200" in written, "the access log is on"
    assert [secret for secret in SECRETS if secret in written] == [], written


def make_trouble(url: str, engine: ScriptedEngine, keys: Path) -> None:
    """Answers, refusals of every kind, engines that die, keys that break: all that is worth a line."""
    chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        eventually(lambda: http.get("/readyz").status_code == 200, "not ready")
        mine = {"authorization": f"Bearer {KEY}"}
        engine.script = lambda _: answer(ANSWER)
        assert http.post("/v1/chat/completions", json=chat, headers=mine).status_code == 200
        assert http.post("/v1/chat/completions", json=chat | {"n": PROMPT}, headers=mine).status_code == 400
        assert http.post("/v1/chat/completions", json=chat, headers={"authorization": WRONG_KEY}).status_code == 401
        http.post("/v1/chat/completions", content=PROMPT.encode(), headers=mine)
        http.post("/v1/tokenize", json=chat, headers=mine)
        refusal = EngineError(code=ErrorCode.INVALID_VALUE, message=f"no {PROMPT}", param="messages")
        engine.script = lambda _: [Refuse(400, refusal)]
        assert http.post("/v1/chat/completions", json=chat, headers=mine).status_code == 400
        engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Say(Delta(text=ANSWER, token_ids=(1,))), Drop()]
        with http.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}, headers=mine) as stream:
            next(stream.iter_bytes())
        keys.write_text(f"keys: [{{name: one, key: {KEY}, key: [{WRONG_KEY}")


PLANTED = """
import asyncio
from stageline_gateway.endpoints import tokenizing
from stageline_gateway.openai_api import answer_shapes, translate

chat_to_generate = translate.chat_to_generate

async def nobody_waits(asked):
    raise LookupError(f"lost {asked!r}")

def callback(asked):
    raise KeyError(asked)

def bug_in_checks(asked, *rest):
    text = asked.messages[0].text
    if "checks" in text:
        try:
            {}[text]
        except KeyError as error:
            raise RuntimeError(f"can't read {asked!r}") from error
    if "loop" in text:
        loop = asyncio.get_running_loop()
        loop.create_task(nobody_waits(asked))
        loop.call_soon(callback, asked)
    return chat_to_generate(asked, *rest)

def bug_in_answer(self, text, reason):
    raise ExceptionGroup(f"can't write {text}", [ValueError(text)])

def bug_in_route(fields, *rest):
    raise OSError(5, str(fields), fields["messages"][0]["content"])

translate.chat_to_generate, answer_shapes.ChatShape.whole = bug_in_checks, bug_in_answer
tokenizing.parse_tokenize = bug_in_route
from stageline_gateway.command import gateway
gateway()
"""


def test_a_bug_quotes_nothing_in_the_log(tmp_path: Path, engine: ScriptedEngine) -> None:
    endpoints, log = tmp_path / "endpoints.json", tmp_path / "gateway.log"
    write_endpoints(endpoints, group(engine.url))
    engine.script = lambda _: answer(ANSWER)
    with log.open("w") as output:
        command = [sys.executable, "-c", PLANTED, "--port", "0", "--endpoints", str(endpoints)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        eventually(lambda: "listening on" in log.read_text() or process.poll() is not None, log.read_text)
        found = re.search(r"listening on (http://\S+)", log.read_text())
        assert found, log.read_text()
        with httpx.Client(base_url=found[1], trust_env=False, timeout=60) as http:
            eventually(lambda: http.get("/readyz").status_code == 200, "not ready")
            for place in ("checks", "loop", "answer"):
                chat = {"model": MODEL, "messages": [{"role": "user", "content": f"{PROMPT} {place}"}]}
                refused = http.post("/v1/chat/completions", json=chat)
                assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal")
            assert http.post("/tokenize", json=chat).status_code == 500
        eventually(lambda: "nobody_waits" in log.read_text(), log.read_text)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    written = log.read_text()
    assert [secret for secret in SECRETS if secret in written] == [], written
    kinds = ("KeyError", "RuntimeError", "LookupError", "ExceptionGroup", "ValueError", "OSError")
    places = ("in bug_in_checks", "in bug_in_route", "in bug_in_answer", "in callback")
    for told in (*(f"builtins.{kind} " for kind in kinds), *places):
        assert told in written, f"{told} helps whoever mends it:\n{written}"
