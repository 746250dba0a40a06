"""Whatever bytes come over a real socket, whole or in pieces: an answer below 500 in the API's form, or none.

A request is made from parts, of which none, one or two are wrong in some way, so that each gets far before it fails.
"""

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httptools
import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from chaos import fuzz_effort
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from stageline_gateway.server import http_protocol
from stageline_gateway.settings import GatewaySettings

EXAMPLES = 25 * fuzz_effort.FACTOR
PATIENCE_SECONDS = 0.1
"""How long the gateway waits for headers and bodies that never end."""
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}

METHODS = [b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"TRACE", b"post", b"", b"P T"]
PATHS = [
    b"/v1/models", b"/v1/models/%ff%00", b"/pipeline?model=%00&group=x", b"/v1/embeddings", b"/", b"//", b"*", b"/%",
    b"", b"/..%2f..%2fetc", b"http://elsewhere/v1/models", b"/caf\xc3\xa9", b"/a b", b"/?" + b"q" * 5000,
]  # fmt: skip
VERSIONS = [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1 x", b"http/1.1", b""]
ENDS = [b"\n", b"\r", b""]
HEADERS = [
    b"content-length: 0", b"content-length: -1", b"content-length: 5, 5", b"content-length: 99999999999999999999",
    b"content-length: +5", b"content-length: 0x5", b"content-length:", b"transfer-encoding: chunked",
    b"transfer-encoding: chunked, chunked", b"transfer-encoding: gzip", b"transfer-encoding: xchunked",
    b"content-type: text/plain", b"content-type: application/json; charset=utf-16", b"content-type: ;;\"",
    b"content-encoding: gzip", b"expect: 100-continue", b"expect: a pony", b"connection: upgrade\r\nupgrade: websocket",
    b"connection: upgrade, http2-settings\r\nupgrade: h2c", b"connection: close", b"connection: \xff",
    b"authorization: Bearer \xff\xfe", b"x-request-id: \x01", b"x-session-id: " + b"s" * 9000, b"traceparent: 00-0-0-0",
    b"tracestate: ,=,", b" folded: value", b"no colon", b": no name", b"a\x00b: c", b"a: b\x00c", b"host: a\r\nhost: b",
    b"cookie: " + b"c" * 40_000,
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["messages", "prompt", "tokens", "stream", "n", "tools", "stop", "seed", "logprobs", "extra"])
GOOD: list[tuple[bytes, dict[str, Any]]] = [
    (b"/v1/completions", TEXT),
    (b"/v1/completions", TEXT | {"stream": True}),
    (b"/v1/chat/completions", CHAT),
    (b"/v1/chat/completions", CHAT | {"stream": True}),
    (b"/tokenize", TEXT),
    (b"/detokenize", {"model": MODEL, "tokens": [1]}),
]
BODIES = st.builds(
    lambda base, extra: json.dumps(base | extra).encode(),
    st.sampled_from([CHAT, TEXT, {"model": MODEL, "tokens": [1]}, {}]),
    st.dictionaries(FIELDS, VALUES, min_size=1, max_size=2),
) | st.binary(max_size=60)


def chunked(body: bytes, size_text: bytes, end: bytes) -> bytes:
    """`body` as chunks, the first with a size of its own."""
    half = len(body) // 2
    first = (size_text or b"%x" % half) + b"\r\n" + body[:half] + b"\r\n"
    return first + b"%x\r\n" % (len(body) - half) + body[half:] + b"\r\n" + end


CHUNK_SIZES = [b"ZZ", b"-1", b"fffffffffffffffff", b'5;ext="', b"0"]
LAST_CHUNKS = [b"0\r\ntrailer: x\r\n\r\n", b"", b"0\r\n", b"0\r\nbad\x00\r\n\r\n"]
PARTS = ["method", "path", "version", "end", "header", "body", "length", "chunk", "last chunk"]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request, more or less."""
    wrong = draw(st.sets(st.sampled_from(PARTS), max_size=2))

    def part(name: str, right: bytes, others: list[bytes]) -> bytes:
        return draw(st.sampled_from(others)) if name in wrong else right

    route, good = draw(st.sampled_from(GOOD))
    body = draw(BODIES) if "body" in wrong else json.dumps(good).encode()
    path = part("path", route, PATHS)
    first = b" ".join((part("method", b"POST", METHODS), path, part("version", b"HTTP/1.1", VERSIONS)))
    if wrong & {"chunk", "last chunk"}:
        framing = b"transfer-encoding: chunked"
        body = chunked(body, part("chunk", b"", CHUNK_SIZES), part("last chunk", b"0\r\n\r\n", LAST_CHUNKS))
    else:
        framing = b"content-length: %d" % (
            len(body) + (draw(st.sampled_from([-1, 1, 1000])) if "length" in wrong else 0)
        )
    lines = [first, b"host: x", b"content-type: application/json", framing]
    lines += draw(st.lists(st.sampled_from(HEADERS), min_size=1, max_size=2)) if "header" in wrong else []
    end = part("end", b"\r\n", ENDS)
    return end.join(lines) + end + end + body


WELL_MEANT = st.lists(requests(), min_size=1, max_size=2).map(b"".join)
SENT = st.sampled_from([True] * 9 + [False]).flatmap(
    lambda means_well: WELL_MEANT if means_well else st.binary(max_size=40)
)
CUTS = st.lists(st.floats(0, 1), max_size=3)


class Answer:
    """What came back, if it was HTTP."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self.is_whole = False
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.is_whole = False
        self.bodies.append(b"")

    def on_headers_complete(self) -> None:
        self.statuses.append(self.parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.is_whole = True


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """One gateway for all examples, that waits for nothing long."""
    engine = ScriptedEngine()
    engine.replies |= {"POST /v1/tokenize": (200, '{"token_ids": [5], "max_model_len": 99}')}
    engine.replies |= {"POST /v1/detokenize": (200, '{"text": "x"}')}
    engine.start()
    path = tmp_path_factory.mktemp("malformed") / "endpoints.json"
    with running_gateway(GatewaySettings(path, body_timeout_seconds=PATIENCE_SECONDS)) as gateway:
        gateway.serve(group(engine.url))
        # Where a client can't tell that an answer is over, it waits for the connection's end.
        gateway.servers.public.config.timeout_keep_alive = 1
        yield gateway
    engine.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """While examples are sent: what a client asks besides must not be cut short where the machine is busy."""
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_SECONDS", PATIENCE_SECONDS)


def exchange(gateway: RunningGateway, pieces: list[bytes], goes_on: bool) -> Answer:
    """Send `pieces`, then leave or wait for what comes back."""
    url = httpx.URL(gateway.url)
    answer = Answer()
    with socket.create_connection((url.host, url.port or 0), timeout=60) as raw, suppress(ConnectionError):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            raw.sendall(piece)
        if not goes_on:
            with suppress(OSError):  # answered and closed already
                raw.shutdown(socket.SHUT_WR)
        while data := raw.recv(65536):
            # An answer to HEAD has a length and no body: that is no answer for a parser that wasn't told.
            with suppress(httptools.HttpParserError):
                answer.parser.feed_data(data)
            if answer.is_whole:
                break
    return answer


@pytest.mark.usefixtures("impatient")
@seed(fuzz_effort.SEED)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(sent=SENT, cuts=CUTS, goes_on=st.booleans())
def test_no_bytes_get_an_answer_of_500_or_none_in_the_apis_form(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture, sent: bytes, cuts: list[float], goes_on: bool
) -> None:
    caplog.set_level(logging.ERROR)
    places = sorted(int(cut * len(sent)) for cut in cuts)
    pieces = [sent[begin:end] for begin, end in zip([0, *places], [*places, len(sent)], strict=True)]
    answer = exchange(gateway, [piece for piece in pieces if piece], goes_on)
    for status, body in zip(answer.statuses, answer.bodies, strict=False):
        assert 100 <= status < 500, (status, body, sent)
        if status >= 400 and body:
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, (status, body, sent)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == [], (errors, sent)


def test_nothing_of_it_is_left(gateway: RunningGateway) -> None:
    """Runs after the other, on the same gateway."""
    gateway.http.close()
    connections = gateway.servers.public.server_state.connections
    eventually(lambda: not connections, lambda: f"{len(connections)} connections are open")
    eventually(lambda: set(held(gateway)) == {0}, lambda: f"open, bytes, being read: {held(gateway)}")
    # A body that a busy machine sends too late is refused: that is what this gateway was made for.
    asked = f"{gateway.url}/v1/completions"
    eventually(lambda: httpx.post(asked, json=TEXT, trust_env=False, timeout=60).is_success, "no answer any more")


def held(gateway: RunningGateway) -> tuple[int, int, int]:
    """Open requests, bytes of bodies, bodies that are being read. A request outlives its client by a moment."""
    status = gateway.admin.get("/status").json()
    return status["open_requests"], status["bodies"]["bytes"], status["bodies"]["being_read"]
