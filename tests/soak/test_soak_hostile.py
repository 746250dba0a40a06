"""What the hostile part of a soak calls a failure, before a server that stands still when it is told to."""

import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest

from hostility.bystanders import bystanders
from hostility.hostile_requests import HostileRequest, hostile_requests
from hostility.repeated_parts import BODY_BYTES, COMPLETIONS
from hostility.soak_hostile import LONGEST_GAP_SECONDS, HostileSoak, judge, report_lines, soak_hostile
from processes.loopback_server import loopback_server

STILL_SECONDS = 4 * LONGEST_GAP_SECONDS


class Stage:
    """Tokens for everybody, one in 10 ms, unless `still`."""

    def __init__(self) -> None:
        self.still = threading.Lock()
        self.asked: list[str] = []


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def url(stage: Stage) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked = json.loads(body).get("prompt", "") if body.startswith(b"{") else ""
            if asked.startswith("bystander"):
                self._stream()
                return
            stage.asked.append(asked)
            if asked == "always" or (asked == "once" and stage.asked.count("once") == 1):
                with stage.still:
                    time.sleep(STILL_SECONDS)
            self.send_response(500 if asked == "breaks" else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _stream(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(100_000):
                    with stage.still:
                        self.wfile.write(b"data: x\n\n")
                    time.sleep(0.01)
            except OSError:
                pass  # the bystander left

        def log_message(self, *_: Any) -> None:
            pass

    with loopback_server(Handler) as url:
        yield url


@pytest.mark.parametrize(
    ("prompt", "sent", "words"),
    [("harmless", 1, ""), ("always", 3, "held others up for"), ("once", 3, ""), ("breaks", 1, "got 500")],
)
def test_who_holds_others_up_again_and_again_is_a_failure(
    stage: Stage, url: str, prompt: str, sent: int, words: str
) -> None:
    state = HostileSoak(seed=1, count=1)
    request = HostileRequest(prompt, COMPLETIONS, json.dumps({"prompt": prompt}).encode())
    with (
        bystanders(url, state.failures) as watching,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
    ):
        judge(http, request, watching, state)
    assert len(stage.asked) == sent, stage.asked
    assert (len(state.failures), words in "".join(state.failures)) == (1 if words else 0, True), state
    assert state.held_up_once.total() == (prompt == "once")
    if prompt == "always":
        assert state.gaps["always"] > STILL_SECONDS / 2


def test_a_server_that_grows_too_large_ends_the_part(url: str) -> None:
    state = HostileSoak(seed=2, count=50)
    soak_hostile(url, state, lambda _: None, lambda: "gateway holds 2000 MiB")
    assert [failure.partition(": ")[2] for failure in state.failures] == ["gateway holds 2000 MiB"], state
    assert state.answered.total() == 1


def test_bodies_are_of_every_kind_and_never_larger_than_a_gateway_takes() -> None:
    drawn = list(hostile_requests(random.Random(3), 60))
    assert len({each.kind for each in drawn}) >= 48
    assert max(len(each.body) for each in drawn) <= BODY_BYTES + 1024
    again = list(hostile_requests(random.Random(3), 60))
    assert drawn == again, "a seed repeats them"


def test_the_report_has_the_figures_and_the_failures_last() -> None:
    state = HostileSoak(seed=7, count=2)
    state.answered.update({"400": 2})
    state.gaps.update({"digits": 0.04, "stops": 0.3})
    state.failures.append("stops (9 bytes) held others up for 0.30, 0.31 s")
    assert report_lines(state) == [
        "hostile: seed 7, 2 bodies sent; answers: 400 2",
        "  largest gaps: stops 300 ms, digits 40 ms",
        "  held up once and not again: 0",
        "hostile failures: 1",
        "  stops (9 bytes) held others up for 0.30, 0.31 s",
    ]
