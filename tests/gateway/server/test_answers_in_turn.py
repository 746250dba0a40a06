"""What a connection says by itself comes in its turn: never within an answer, and never twice for one request."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httptools
import httpx
import pytest

from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import Hold, Say, ScriptedEngine, answer
from stageline_api import http_connection
from stageline_api.engine_http import Admitted, Delta, TextPrompt
from stageline_gateway.server import http_protocol
from stageline_gateway.server.http_protocol import HEADER_LIMIT_BYTES, MOST_SENT_AHEAD, GatewayProtocol
from stageline_gateway.settings import GatewaySettings

LAST = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(http_protocol, "REST_SECONDS", 0.5)
    monkeypatch.setattr(http_protocol, "MOST_PIECES", 8)


@pytest.fixture
def gateway(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """One that has no other connections, and whose engine stops after the first text."""
    engine.script = lambda _: [
        Say(Admitted(prompt_tokens=1)),
        Say(Delta(text="a", token_ids=(1,))),
        Hold(),
        *answer("z")[1:],
    ]
    with running_gateway(GatewaySettings(tmp_path / "e.json")) as gateway:
        gateway.serve(group(engine.url))
        gateway.http.close()
        eventually(lambda: not connections(gateway), "the test's own are gone")
        yield gateway


def connections(gateway: RunningGateway) -> list[GatewayProtocol]:
    every = tuple(gateway.servers.public.server_state.connections)
    return [one for one in every if isinstance(one, GatewayProtocol)]


def connect(gateway: RunningGateway) -> socket.socket:
    url = httpx.URL(gateway.url)
    return socket.create_connection((url.host, url.port or 0), timeout=60)


def request(stream: bool) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": stream}).encode()
    return POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)


class Answers:
    """What came back, as a client reads it: raises HttpParserError for anything else than answers in turn."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self.is_whole = True
        self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.is_whole = False
        self.bodies.append(b"")

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.is_whole = True

    def read(self, raw: socket.socket, until: Callable[[], bool] = lambda: False) -> "Answers":
        while not until() and (data := raw.recv(65536)):
            self._parser.feed_data(data)
        return self


def refused(gateway: RunningGateway) -> bool:
    return all(one._is_refused for one in connections(gateway))


BROKEN: dict[str, tuple[bytes, list[int]]] = {
    "garbage": (b"\x00garbage\r\n\r\n", [400]),
    "a request, then garbage": (GET + b"\x00garbage\r\n\r\n", [200, 400]),
    "too many requests": (GET * (MOST_SENT_AHEAD + 1), [200] * MOST_SENT_AHEAD + [400]),
    "slow headers": (b"GET /healthz HTTP/1.1\r\nhost: x\r\n", [408]),
    "large headers": (b"GET / HTTP/1.1\r\nx: " + b"a" * (HEADER_LIMIT_BYTES + 1) + b"\r\n\r\n", [431]),
    "a body in bad chunks": (CHUNKED + b"ZZ\r\n", [400]),
    "a body in too many chunks": (CHUNKED + b"1\r\n \r\n" * 9, [400]),
    "a request, then a body in bad chunks": (GET + CHUNKED + b"ZZ\r\n", [200, 400]),
    "a tunnel": (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", [400]),
    "another protocol": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    "two lengths": (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", [400]),
}


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_refusal_follows_the_answer_before_it(
    gateway: RunningGateway, engine: ScriptedEngine, name: str, streams: bool
) -> None:
    sent, statuses = BROKEN[name]
    answers = Answers()
    with connect(gateway) as raw:
        raw.sendall(request(streams))
        if streams:
            answers.read(raw, lambda: any(b'"a"' in body for body in answers.bodies))
        eventually(lambda: engine.requests, "the request came")
        raw.sendall(sent)
        eventually(lambda: refused(gateway), "what is no request was refused")
        engine.release()
        answers.read(raw)
    assert answers.statuses == [200, *statuses], answers.bodies
    assert answers.is_whole
    assert b"z" in answers.bodies[0]
    assert answers.bodies[0].endswith(b"data: [DONE]\n\n") == streams, answers.bodies[0]


def test_who_goes_on_sending_behind_a_refusal_is_dropped(gateway: RunningGateway) -> None:
    with connect(gateway) as raw:
        raw.sendall(request(True) + b"\x00garbage\r\n\r\n")
        with pytest.raises(OSError):
            raw.sendall(b"x" * (64 * 1024 * 1024))
    assert http_connection.MAX_DISCARDED_BYTES < 64 * 1024 * 1024


def test_a_shutdown_finishes_the_answer_and_says_nothing_else(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    answers = Answers()
    with connect(gateway) as raw:
        raw.sendall(request(True))
        answers.read(raw, lambda: any(b'"a"' in body for body in answers.bodies))
        raw.sendall(b"\x00garbage\r\n\r\n")
        eventually(lambda: refused(gateway), "it was refused")
        assert gateway.loop is not None
        gateway.loop.call_soon_threadsafe(gateway.servers.stop)
        engine.release()
        answers.read(raw)
    assert answers.statuses[0] == 200
    assert answers.bodies[0].endswith(b"data: [DONE]\n\n"), answers.bodies
    assert answers.statuses[1:] in ([], [400])


@pytest.mark.parametrize("rest", [b"", b"ZZ\r\n", b"1\r\n \r\n" * 9], ids=["late", "bad", "in too many chunks"])
def test_a_request_that_was_answered_before_its_body_came_gets_no_second_answer(
    gateway: RunningGateway, rest: bytes
) -> None:
    answers = Answers()
    with connect(gateway) as raw:
        raw.sendall(b"POST /absent HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        answers.read(raw, lambda: bool(answers.statuses) and answers.is_whole)
        raw.sendall(rest or b"1\r\n")
        answers.read(raw)
    assert answers.statuses == [404], answers.bodies


OFFERS: dict[str, bytes] = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAAAAMAAAAA\r\n",
    "h2c alone": b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    "TLS": b"connection: upgrade\r\nupgrade: TLS/1.0\r\n",
    "websocket": b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
    "several": b"upgrade: h2c, websocket\r\nconnection: keep-alive, upgrade\r\nupgrade: foo/2\r\n",
    "no connection": b"upgrade: h2c\r\n",
    "TE": b"connection: TE\r\nte: trailers, deflate;q=0.5\r\n",
    "its own close": b"connection: upgrade, close\r\nupgrade: h2c\r\n",
}
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def pieces_of(offer: bytes, body: bytes, framing: str, path: bytes) -> list[bytes]:
    """A request in pieces as segments bring them: its headers, and its body in two."""
    head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%b" % (path, offer)
    if framing == "chunked":
        half = len(body) // 2
        chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:])]
        return [head + b"transfer-encoding: chunked\r\n\r\n", chunks[0], chunks[1] + b"0\r\n\r\n"]
    return [head + b"content-length: %d\r\n\r\n" % len(body), body[:5], body[5:]]


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("offer", OFFERS)
def test_an_offer_of_another_protocol_is_ignored(
    tmp_path: Path, engine: ScriptedEngine, offer: str, framing: str, apart: bool
) -> None:
    body = json.dumps({"model": MODEL, "prompt": SMUGGLED.decode()}).encode()
    pieces = pieces_of(OFFERS[offer], body, framing, b"/v1/completions")
    answers = Answers()
    with running_gateway(GatewaySettings(tmp_path / "e.json")) as gateway:
        gateway.serve(group(engine.url))
        with connect(gateway) as raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for number, piece in enumerate(pieces if apart else [b"".join(pieces)]):
                if number:
                    eventually(lambda: any(one.cycle for one in connections(gateway)), "the headers were read")
                raw.sendall(piece)
            if b"close" not in OFFERS[offer]:
                raw.sendall(LAST)
            answers.read(raw)
    assert answers.statuses == [200] * (1 if b"close" in OFFERS[offer] else 2), answers.bodies
    assert [one.prompt for one in engine.requests] == [TextPrompt(text=SMUGGLED.decode())]


@pytest.mark.parametrize("port", ["public", "admin"])
@pytest.mark.parametrize("offer", [name for name in OFFERS if name != "its own close"])
def test_a_body_behind_an_offer_is_no_request_of_its_own(gateway: RunningGateway, offer: str, port: str) -> None:
    url = httpx.URL(gateway.url if port == "public" else str(gateway.admin.base_url))
    path = b"/v1/completions" if port == "public" else b"/status"
    answers = Answers()
    with socket.create_connection((url.host, url.port or 0), timeout=60) as raw:
        for piece in pieces_of(OFFERS[offer], SMUGGLED, "length", path):
            raw.sendall(piece)
        answers.read(raw, lambda: bool(answers.statuses) and answers.is_whole)
        raw.sendall(LAST)
        answers.read(raw)
    assert answers.statuses == [400 if port == "public" else 405, 200], answers.bodies


def test_requests_with_offers_sent_ahead_are_answered_each(gateway: RunningGateway) -> None:
    one = b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + OFFERS["h2c"] + b"\r\n"
    answers = Answers()
    with connect(gateway) as raw:
        raw.sendall(one * 10 + LAST)
        answers.read(raw)
    assert answers.statuses == [200] * 11
