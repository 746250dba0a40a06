"""The log of a gateway's process: JSON beside no terminal, and each request in it while it speaks in detail."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from processes.gateway_harness import MODEL, eventually, group, write_endpoints
from processes.scripted_engine import ScriptedEngine, answer
from stageline_gateway.telemetry.metric_names import IN_FLIGHT


@contextmanager
def gateway(directory: Path, engine_url: str) -> Iterator[tuple[subprocess.Popen[bytes], str, str, Path]]:
    """A gateway's process, its URL, its admin port's URL and its log."""
    endpoints, log = directory / "endpoints.json", directory / "gateway.log"
    write_endpoints(endpoints, group(engine_url))
    command = [sys.executable, "-m", "stageline_gateway", "--port", "0", "--endpoints", str(endpoints)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        eventually(lambda: "listening on" in log.read_text() or process.poll() is not None, log.read_text)
        first = next(line for line in lines_of(log.read_text()) if "listening on" in line["message"])
        _, _, _, url, _, _, admin_url, *_ = first["message"].split()
        yield process, url, admin_url, log
    finally:
        process.kill()
        process.wait(60)


def lines_of(log: str) -> list[dict[str, Any]]:
    """Every line must be JSON."""
    return [json.loads(line) for line in log.splitlines()]


def test_a_gateway_tells_each_request_by_both_its_names_once_it_is_asked_for_details(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.script = lambda _: answer("fine")

    def ask(url: str, name: str) -> str:
        headers = {"x-request-id": name}
        body = {"model": MODEL, "prompt": "the heron's secret"}
        answered = httpx.post(f"{url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60)
        assert answered.status_code == 200, answered.text
        return str(answered.json()["id"])

    def is_idle(admin_url: str) -> bool:
        """A request's line is written while it is in flight still, and after the client has its answer."""
        page = httpx.get(f"{admin_url}/metrics", trust_env=False, timeout=60).text
        return f'{IN_FLIGHT.name}{{model_name="{MODEL}",namespace=""}} 0.0' in page

    with gateway(tmp_path, engine.url) as (process, url, admin_url, log):
        ask(url, "before")
        eventually(lambda: is_idle(admin_url), log.read_text)
        process.send_signal(signal.SIGUSR1)
        eventually(lambda: "level is now debug" in log.read_text(), log.read_text)
        own_name = ask(url, "during")
        eventually(lambda: "during" in log.read_text(), log.read_text)
        process.send_signal(signal.SIGUSR2)
        eventually(lambda: "level is now info" in log.read_text(), log.read_text)
        ask(url, "after")
    told = [line for line in lines_of(log.read_text()) if "client_request_id" in line]
    assert [(line["level"], line["client_request_id"], line["request_id"]) for line in told] == [
        ("debug", "during", own_name)
    ]
    assert told[0]["component"] == "gateway"
    assert "heron" not in log.read_text()
