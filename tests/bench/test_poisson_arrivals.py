"""The open-loop load over HTTP: the same arrivals for every server, sent on time, measured from sending to tokens."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest

from processes.loopback_server import served
from stageline_api.errors import UserError
from stageline_bench.runtime.group.arrivals import ArrivalLoad, StreamTimes, play
from stageline_bench.runtime.serve import serve_targets, stream_figures

PAUSE_SECONDS = 0.02
LOAD = ArrivalLoad(rate=50.0, requests=10, input_tokens=4, output_tokens=3)


class TokenServer(ThreadingHTTPServer):
    """Answers each completion with as many chunks as tokens were asked for, a pause before each."""

    request_queue_size = 64

    def __init__(self, *, status: int = 200, chunks: bool = True, answer_after: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.chunks, self.answer_after = status, chunks, answer_after
        """`answer_after`: how many requests must have arrived before the first is answered."""
        self.bodies: list[dict[str, Any]] = []
        self.another = threading.Condition()
        self.impatient = False

    def arrive(self, body: dict[str, Any]) -> None:
        with self.another:
            self.bodies.append(body)
            self.another.notify_all()
            self.impatient |= not self.another.wait_for(lambda: len(self.bodies) >= self.answer_after, timeout=60)


class _Handler(BaseHTTPRequestHandler):
    server: TokenServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.arrive(body)
        self.send_response(self.server.status)
        self.end_headers()
        if self.server.chunks:
            for token in range(body["max_tokens"]):
                time.sleep(PAUSE_SECONDS)
                self.wfile.write(b'data: {"token": %d}\n\n' % token)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_every_request_arrives_with_its_prompt_and_each_stream_is_timed() -> None:
    server = TokenServer()
    with served(server) as url:
        streams = asyncio.run(play(url, "m", LOAD, 1000))
    assert sorted(body["prompt"] for body in server.bodies) == sorted(LOAD.prompts(1000))
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 and body["stream"] for body in server.bodies)
    assert len(streams) == LOAD.requests
    # Three chunks with a pause before each. A chunk may be read late, so only the sum has all three pauses.
    assert all(one.first_token_seconds >= PAUSE_SECONDS for one in streams), streams
    assert all(one.first_token_seconds + one.rest_seconds >= 3 * PAUSE_SECONDS for one in streams), streams


def test_requests_are_sent_while_earlier_ones_are_unanswered() -> None:
    server = TokenServer(answer_after=LOAD.requests)
    with served(server) as url:
        streams = asyncio.run(play(url, "m", LOAD, 1000))
    assert len(streams) == LOAD.requests
    assert not server.impatient, "a request waited for the answer to an earlier one"


def test_arrivals_follow_from_the_seed_and_keep_the_rate() -> None:
    many = ArrivalLoad(rate=8.0, requests=4000, input_tokens=2, output_tokens=2)
    moments = many.arrival_seconds()
    assert moments == many.arrival_seconds()
    gaps = [after - before for before, after in pairwise(moments)]
    assert mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert min(gaps) >= 0


@pytest.mark.parametrize(
    ("server", "words"), [(TokenServer(status=503), "status 503"), (TokenServer(chunks=False), "no token")]
)
def test_an_error_or_an_empty_answer_is_not_measured(server: TokenServer, words: str) -> None:
    with served(server) as url, pytest.raises(UserError, match=words):
        asyncio.run(play(url, "m", LOAD, 1000))


def test_ratios_are_medians_of_pairs_of_starts() -> None:
    assert stream_figures([StreamTimes(0.1, 0.2), StreamTimes(0.3, 0.4)], 3)["mean_tpot_seconds"] == 0.15
    measured = [
        {"engine": engine, "mean_ttft_seconds": first, "mean_tpot_seconds": between}
        for engine, first, between in (
            ("stageline", 1.0, 4.0),
            ("vllm", 2.0, 2.0),
            ("vllm", 4.0, 2.0),
            ("stageline", 1.0, 2.0),
            ("stageline", 9.0, 1.0),
            ("vllm", 1.0, 1.0),
        )
    ]
    found = {target.name: (target.measured, target.met) for target in serve_targets(measured)}
    assert found == {"TTFT: Stageline / vLLM": (0.5, True), "TPOT: Stageline / vLLM": (1.0, True)}
