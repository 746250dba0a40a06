"""Clients that leave, by the thousand and at every moment, leave nothing behind: no file, no task, no place taken.

Ten thousand take some twenty seconds; STAGELINE_ABORTS=200 is enough while one works on it.
"""

import asyncio
import json
import logging
import os
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import httpx
import pytest

from processes.gateway_harness import MODEL, RunningGateway, eventually
from processes.scripted_engine import Drop, Hold, Pause, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import Admitted, Delta, GenerateRequest

ABORTS = int(os.environ.get("STAGELINE_ABORTS", "10000"))
AT_ONCE = 25
BODY = json.dumps({"model": MODEL, "prompt": "x" * 500, "stream": True}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
"""A gateway without keys on loopback answers only requests that name this machine."""
REQUEST = HEAD % len(BODY) + BODY
ADMITTED = Say(Admitted(prompt_tokens=1))
SLOWLY: list[Step] = [Say(Delta(text="a", token_ids=(1,))), Pause(0.001)] * 50
SCRIPTS: list[list[Step]] = [
    [Hold()],
    [ADMITTED, Hold()],
    [ADMITTED, *SLOWLY, Hold()],
    [ADMITTED, Say(Delta(text="a" * 100_000, token_ids=(1,))), Hold()],
    answer("a", "b", "c"),
]
BREAKS: list[Step] = [ADMITTED, Say(Delta(text="a", token_ids=(1,))), Drop()]
BREAKS_EACH = 53
"""One answer in so many breaks: several in a row would keep the circuit open for most of the test."""


async def leave(address: tuple[str, int], draw: random.Random) -> None:
    """Ask, and go away: in the middle of the request, before an answer, or within it; sometimes with a reset."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        whole = draw.random() < 0.8
        writer.write(REQUEST if whole else REQUEST[: draw.randrange(1, len(REQUEST))])
        if whole and draw.random() < 0.7:
            async with asyncio.timeout(draw.uniform(0, 0.5)):
                await reader.read(draw.randrange(1, 2000))
    except (TimeoutError, OSError):
        pass
    finally:
        if draw.random() < 0.5:
            writer.transport.abort()
        writer.close()


async def leave_often(address: tuple[str, int]) -> None:
    draw, left = random.Random(11), count()

    async def one_after_another() -> None:
        while next(left) < ABORTS:
            await leave(address, draw)

    await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))


def open_files() -> int:
    """File descriptors of this process: gateway, engine and clients."""
    return len(list(Path("/proc/self/fd").iterdir()))


def gateway_tasks(gateway: RunningGateway) -> int:
    return int(gateway.admin.get("/status").json()["tasks"])


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_nothing_is_left_of_clients_that_left(
    gateway: RunningGateway, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = count(1)

    def script(_: GenerateRequest) -> list[Step]:
        number = next(numbers)
        return SCRIPTS[number % len(SCRIPTS)] if number % BREAKS_EACH else BREAKS

    engine.script = script
    url = httpx.URL(gateway.url)
    caplog.set_level(logging.ERROR)
    eventually(lambda: engine.num_probes, "no probe came: its task belongs to what was there before")
    tasks_before, files_before = min(gateway_tasks(gateway) for _ in range(5)), open_files()
    asyncio.run(leave_often((url.host, url.port or 0)))

    def settled(reading: Callable[[], int], before: int, what: str) -> None:
        eventually(lambda: reading() <= before, lambda: f"{what}: {reading()}, and {before} before")

    settled(lambda: int(gateway.sample("stageline_gateway_requests_in_flight", model_name=MODEL)), 0, "in flight")
    settled(lambda: int(gateway.sample("stageline_gateway_requests_queued", model_name=MODEL)), 0, "queued")
    settled(lambda: int(gateway.admin.get("/status").json()["open_requests"]), 0, "open")
    settled(open_files, files_before + 2, "open files")
    settled(lambda: gateway_tasks(gateway), tasks_before, "tasks")
    assert len(engine.requests) > ABORTS // 10, f"{len(engine.requests)} got as far as the engine"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    engine.script = lambda _: answer("still here")
    body = {"model": MODEL, "prompt": "x"}
    # The last engines to break may have opened the circuit: it admits again after a moment.
    eventually(lambda: gateway.http.post("/v1/completions", json=body).is_success, "no answer any more")
    assert gateway.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "still here"
