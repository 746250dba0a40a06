"""Streamed chat requests to a real gateway before a real group of two stages, and the calls that each of them causes.

Gateway, engine and stage 0 are recorded: first a pause in which nobody asks, then one request at a time, each on a
connection of its own. Warming requests go before, unrecorded, so that pools are filled and late imports are done.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import httpx

from oracles.tiny_models import write_tiny_llama
from processes.call_recorder import Record, RecordedProcess, recorded
from processes.ended_process import end_process
from processes.free_ports import free_port
from processes.gateway_harness import MODEL, eventually, write_endpoints
from processes.running_group import RunningGroup, running_group
from stageline_runtime.engine.core import HEARTBEAT_SECONDS

GATEWAY: Final = "gateway"
ENGINE: Final = "engine"
STAGE_0: Final = "stage 0"
MAX_TOKENS: Final = 8
AFTERMATH_SECONDS: Final = 0.3
"""A request's record goes on for so long after its end: counting it and closing its connection belong to it too."""
PAUSE_SECONDS: Final = 3.0
"""Longer than the period of all background work that need not be done for requests alone: that is 1 s at most."""
_MOST_PAUSES: Final = 5
_PROBE_SECONDS: Final = 600
"""The gateway's questions to the engine go the way of requests: none is asked after the first."""
_ANSWER_SECONDS: Final = 60.0
_END_SECONDS: Final = 60.0

Records = dict[str, Record]
"""By process."""


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """What was recorded during each request, and while nobody asked."""

    requests: tuple[Records, ...]
    pause: Records


def record_requests(directory: Path, num_requests: int) -> RecordedRequests:
    """Start a gateway and a group, ask `num_requests` times, and end all."""
    model_dir = write_tiny_llama(directory / "model")
    with (
        running_group(
            directory / "group",
            model_dir,
            2,
            dtype="float32",
            engine_command=recorded(directory / "engine", "engine"),
            stage_command=recorded(directory / "stage", "stage"),
            is_fresh=True,
        ) as group,
        _running_gateway(directory, group) as (gateway, url),
    ):
        processes = {
            GATEWAY: RecordedProcess(gateway.send_signal, directory / "gateway"),
            ENGINE: RecordedProcess(group.processes["engine"].send_signal, directory / "engine"),
            STAGE_0: RecordedProcess(group.processes["stage-0"].send_signal, directory / "stage"),
        }
        record = partial(_record, processes, lambda come: eventually(come, group.account))
        pause = _recorded_pause(url, record)
        asks = (partial(_ask, url, f"{number} times?") for number in range(num_requests))
        return RecordedRequests(tuple(record(ask) for ask in asks), pause)


def _recorded_pause(url: str, record: Callable[[Callable[[], None]], Records]) -> Records:
    """What runs in a pause after warming requests.

    A group that has nothing to do for `HEARTBEAT_SECONDS` computes a plan, as requests do, so a pause that a slow
    machine made as long as that tells nothing.
    """
    for number in range(_MOST_PAUSES):
        _ask(url, f"Warming {number}")
        began = time.monotonic()
        _ask(url, f"Warm {number}")
        pause = record(partial(time.sleep, PAUSE_SECONDS))
        if time.monotonic() - began < HEARTBEAT_SECONDS:
            return pause
    raise AssertionError(f"a pause of {PAUSE_SECONDS:g} s took {HEARTBEAT_SECONDS:g} s {_MOST_PAUSES} times")


def _record(
    processes: dict[str, RecordedProcess], wait: Callable[[Callable[[], bool]], None], act: Callable[[], None]
) -> Records:
    for process in processes.values():
        process.begin(wait)
    act()
    return {name: process.end(wait) for name, process in processes.items()}


def _ask(url: str, question: str) -> None:
    """One streamed chat request, read to its end, and what comes after that.

    Questions must begin differently, or the KV cache would hold the beginning of the later ones.
    """
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=_ANSWER_SECONDS) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        text = response.read().decode()
        assert response.status_code == 200, text
        assert text.rstrip().endswith("data: [DONE]"), text
    time.sleep(AFTERMATH_SECONDS)


@contextmanager
def _running_gateway(directory: Path, group: RunningGroup) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A gateway that has a ready group, and its URL."""
    endpoints, log = directory / "endpoints.json", directory / "gateway.log"
    write_endpoints(endpoints, group.endpoint)
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = ("--port", str(port), "--admin-port", "0", "--probe-seconds", str(_PROBE_SECONDS))
    command = recorded(directory / "gateway", "gateway", *options, "--endpoints", str(endpoints))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(os.environ),
        )
    try:
        eventually(lambda: _is_ready(process, url, log), log.read_text)
        yield process, url
    finally:
        end_process(process, _END_SECONDS)


def _is_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, f"the gateway ended with {process.returncode}:\n{log.read_text()}"
    try:
        return httpx.get(f"{url}/readyz", timeout=_ANSWER_SECONDS, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
