"""The command as a process: where it listens, how it refuses to start, how it drains."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from processes.gateway_command import COMMAND, gateway_process
from processes.gateway_harness import MODEL, eventually
from processes.nameless_user import as_nameless_user, skip_without_namespaces
from processes.scripted_engine import Hold, Say, ScriptedEngine, answer
from stageline_api.engine_http import Admitted
from stageline_gateway.server.listening import bind
from stageline_gateway.settings import DRAIN_SIGNAL

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x", "stream": True}


@contextmanager
def open_stream(url: str) -> Iterator[Iterator[str]]:
    """The lines of a stream whose request was admitted."""
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=BODY) as streaming,
    ):
        assert streaming.status_code == 200
        yield streaming.iter_lines()


def hold_before_text(engine: ScriptedEngine) -> None:
    """Admit, then wait for the test."""
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Hold(), *answer("late")[1:]]


def test_it_serves_under_a_user_without_a_name_or_a_home_on_a_read_only_root(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    skip_without_namespaces()
    engine.script = lambda _: answer("hello")
    with gateway_process(tmp_path, engine, under=as_nameless_user()) as (_, url):
        answered = httpx.post(f"{url}/v1/completions", json=BODY | {"stream": False}, trust_env=False, timeout=120)
        assert (answered.status_code, answered.json()["choices"][0]["text"]) == (200, "hello"), answered.text


def test_what_a_gateway_loaded_is_not_walked_again_by_the_garbage_collector(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    """A full round over it would hold up every stream for tens of milliseconds."""
    said = tmp_path / "frozen"
    program = f"""
import gc, pathlib, runpy, threading, time
def look():
    while not gc.get_freeze_count():
        time.sleep(0.01)
    pathlib.Path({str(said)!r}).write_text(f"{{gc.get_freeze_count()}} {{len(gc.get_objects())}}")
threading.Thread(target=look, daemon=True).start()
runpy.run_module("stageline_gateway", run_name="__main__")
"""
    with gateway_process(tmp_path, engine, program=(sys.executable, "-c", program)):
        eventually(lambda: said.exists() and said.read_text() != "", "nothing was settled")
    frozen, walked = map(int, said.read_text().split())
    assert frozen > 20_000, said.read_text()
    assert walked < frozen / 10, said.read_text()


def test_sigterm_lets_streams_finish(tmp_path: Path, engine: ScriptedEngine) -> None:
    hold_before_text(engine)
    with gateway_process(tmp_path, engine, "--drain-seconds", "600") as (process, url), open_stream(url) as lines:
        process.send_signal(signal.SIGTERM)
        address = httpx.URL(url)
        eventually(lambda: not _accepts(address.host, address.port or 0), "it still accepts connections")
        engine.release()
        rest = "\n".join(lines)
        assert "late" in rest
        assert rest.rstrip().endswith("[DONE]")
        assert process.wait(60) == 0


def test_sigterm_tells_load_balancers_before_the_listeners_close(tmp_path: Path, engine: ScriptedEngine) -> None:
    with gateway_process(tmp_path, engine, "--withdraw-seconds", "600") as (process, url):
        admin = re.search(r"admin on (http://\S+)", (tmp_path / "gateway.log").read_text())
        assert admin
        with httpx.Client(base_url=admin[1], trust_env=False, timeout=60) as told:
            eventually(lambda: told.get("/accepting").status_code == 200, "it never accepted")
            process.send_signal(signal.SIGTERM)
            eventually(lambda: told.get("/accepting").status_code == 503, "it says that clients belong here")
            assert "shutting down" in told.get("/accepting").json()["message"]
            assert told.get("/readyz").status_code == 503
            assert told.get("/status").json()["draining"] is True
        answered = httpx.post(f"{url}/v1/completions", json=BODY | {"stream": False}, trust_env=False, timeout=60)
        assert answered.status_code == 200, "who was sent here meanwhile is answered"


def test_the_listeners_close_when_load_balancers_have_had_their_time(tmp_path: Path, engine: ScriptedEngine) -> None:
    with gateway_process(tmp_path, engine, "--withdraw-seconds", "0.5") as (process, url):
        process.send_signal(signal.SIGTERM)
        address = httpx.URL(url)
        eventually(lambda: not _accepts(address.host, address.port or 0), "it still accepts connections")
        assert process.wait(60) == 0


def test_a_person_who_ends_it_does_not_wait(tmp_path: Path, engine: ScriptedEngine) -> None:
    with gateway_process(tmp_path, engine, "--withdraw-seconds", "600") as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_the_admin_port_is_for_this_machine_unless_told_otherwise(tmp_path: Path, engine: ScriptedEngine) -> None:
    """127.0.0.2 stands for an address that others reach."""
    for options, host in (([], "127.0.0.1"), (["--admin-host", "127.0.0.3"], "127.0.0.3")):
        with gateway_process(tmp_path, engine, "--host", "127.0.0.2", *options) as (process, url):
            assert url.startswith("http://127.0.0.2:")
            assert f"admin on http://{host}:" in (tmp_path / "gateway.log").read_text()
            process.terminate()
            process.wait(60)


def test_streams_that_outlast_the_drain_get_an_error_event(tmp_path: Path, engine: ScriptedEngine) -> None:
    hold_before_text(engine)
    with gateway_process(tmp_path, engine, "--drain-seconds", "0.2") as (process, url), open_stream(url) as lines:
        process.send_signal(signal.SIGINT)
        rest = "\n".join(lines)
        assert "shutting down" in rest
        assert "[DONE]" not in rest
        assert process.wait(60) == 0


def test_its_drain_signal_has_new_requests_refused_and_open_ones_go_on(tmp_path: Path, engine: ScriptedEngine) -> None:
    hold_before_text(engine)
    with gateway_process(tmp_path, engine) as (process, url), open_stream(url) as lines:
        process.send_signal(DRAIN_SIGNAL)

        def refusal() -> str:
            return httpx.post(f"{url}/tokenize", json=BODY, trust_env=False, timeout=60).text

        eventually(lambda: '"draining"' in refusal(), lambda: refusal())
        engine.release()
        assert "\n".join(lines).rstrip().endswith("[DONE]")
        assert process.poll() is None, "it ended"


def test_a_second_signal_ends_it_at_once(tmp_path: Path, engine: ScriptedEngine) -> None:
    hold_before_text(engine)
    with gateway_process(tmp_path, engine, "--drain-seconds", "600") as (process, url), open_stream(url):
        process.send_signal(signal.SIGTERM)
        address = httpx.URL(url)
        eventually(lambda: not _accepts(address.host, address.port or 0), "it still accepts connections")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1


def test_a_port_in_use_is_said_in_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--port", str(port), "--endpoints", str(tmp_path / "e.json")]
        ended = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("options", [["--port", "http"], ["--port", "70000"], []], ids=str)
def test_bad_options_are_usage_errors(options: list[str]) -> None:
    ended = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=240, env=dict(os.environ))
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_small_writes_are_never_held_back() -> None:
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=60).close()
    except ConnectionError:
        return False
    return True
