"""Clients that open connections and then do nothing, or never read: bounded in number and in time, and soon gone."""

import resource
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import trustme
from starlette.types import Receive, Scope, Send

from processes.cpu_bounds import CpuBound
from processes.gateway_harness import RunningGateway, eventually, group, running_gateway
from processes.lone_gateway import lone_gateway
from processes.scripted_engine import ScriptedEngine
from stageline_gateway.server import http_protocol, tls_listener
from stageline_gateway.server.http_protocol import MOST_SENT_AHEAD, BoundedConfig, GatewayProtocol
from stageline_gateway.server.tls import TlsFiles
from stageline_gateway.settings import GatewaySettings

GET = b"GET /page.js HTTP/1.1\r\nhost: x\r\n\r\n"
"""Its answer is several KiB."""
ATTACKERS = 20
MOST_BYTES = 48 * 1024 * 1024
"""Of this whole process; they had 11 MiB each."""
SILENT = 300
SILENT_SECONDS = 0.25
"""Of CPU, that the loop may have for all of them."""
SILENT_BYTES = 6 * 1024 * 1024
LIMIT = 10


def connect(gateway: RunningGateway) -> socket.socket:
    url = httpx.URL(gateway.url)
    return connect_to((url.host, url.port or 0))


def connect_to(address: tuple[str, int]) -> socket.socket:
    raw = socket.socket()
    # A window as small as can be, so that few answers fill it.
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(60)
    raw.connect(address)
    return raw


def open_connections(gateway: RunningGateway) -> int:
    return len(gateway.servers.public.server_state.connections)


def waiting_requests(gateway: RunningGateway) -> int:
    protocols = tuple(gateway.servers.public.server_state.connections)
    return max((len(one.pipeline) for one in protocols if isinstance(one, GatewayProtocol)), default=0)


def unsent_bytes(gateway: RunningGateway) -> int:
    protocols = tuple(gateway.servers.public.server_state.connections)
    return sum(one.transport.get_write_buffer_size() for one in protocols if isinstance(one, GatewayProtocol))


def test_requests_sent_ahead_and_never_read_hold_little_and_not_for_long(
    tmp_path: Path, engine: ScriptedEngine, cpu_bound: CpuBound
) -> None:
    most_waiting = most_unsent_bytes = 0
    with (
        running_gateway(GatewaySettings(tmp_path / "e.json", send_timeout_seconds=1)) as gateway,
        ExitStack() as stack,
    ):
        gateway.serve(group(engine.url))
        gateway.http.close()
        eventually(lambda: open_connections(gateway) == 0, "the test's own are gone")
        attackers = [stack.enter_context(connect(gateway)) for _ in range(ATTACKERS)]
        flooding = [threading.Thread(target=flood, args=(raw,), daemon=True) for raw in attackers]
        before, before_bytes = gateway.loop_seconds(), resident_bytes()
        for one in flooding:
            one.start()
        while any(one.is_alive() for one in flooding):
            most_waiting = max(most_waiting, waiting_requests(gateway))
            most_unsent_bytes = max(most_unsent_bytes, unsent_bytes(gateway))
            grown_bytes = resident_bytes() - before_bytes
            assert grown_bytes < MOST_BYTES, f"grew by {grown_bytes} bytes"
            flooding[0].join(0.005)
            flooding = [one for one in flooding if one.is_alive()] or flooding[:1]
        assert most_waiting <= MOST_SENT_AHEAD
        assert most_unsent_bytes < ATTACKERS * 512 * 1024
        spent = gateway.loop_seconds() - before
        assert cpu_bound.holds(spent, 1.0), f"{spent:.3f} s of the loop"
        eventually(lambda: open_connections(gateway) == 0, lambda: f"{open_connections(gateway)} are still held")


def resident_bytes() -> int:
    """Memory of this process, the gateway's too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def flood(raw: socket.socket) -> None:
    """Ask until the other side ends it."""
    try:
        while True:
            raw.sendall(GET * 1000)
    except OSError:
        pass


def test_a_reader_of_short_answers_that_stops_is_dropped(tmp_path: Path, engine: ScriptedEngine) -> None:
    """One request after the other, so nothing is sent ahead; what it doesn't read stays within the socket's buffers."""
    with running_gateway(GatewaySettings(tmp_path / "e.json", send_timeout_seconds=0.5)) as gateway:
        gateway.serve(group(engine.url))
        gateway.http.close()
        gateway.servers.public.config.timeout_keep_alive = 1
        with connect(gateway) as raw:
            for _ in range(40):
                try:
                    raw.sendall(GET)
                except OSError:
                    break
            eventually(lambda: open_connections(gateway) == 0, lambda: f"{open_connections(gateway)} are still held")


def write_tls_files(directory: Path) -> tuple[TlsFiles, ssl.SSLContext]:
    """A certificate for the loopback address, and what trusts it."""
    authority = trustme.CA()
    files = TlsFiles(directory / "tls.crt", directory / "tls.key")
    pair = authority.issue_cert("127.0.0.1")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    pair.private_key_pem.write_to_path(str(files.key))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    return files, trust


@pytest.fixture
def secure(tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    """A gateway with TLS and few connections."""
    files, trust = write_tls_files(tmp_path)
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_SECONDS", 600)
    with running_gateway(GatewaySettings(tmp_path / "e.json"), files, trust, LIMIT) as gateway:
        gateway.serve(group(engine.url))
        yield gateway


def accepted_connections(gateway: RunningGateway) -> int:
    assert gateway.servers.tls_listener is not None
    return len(gateway.servers.tls_listener.open)


def test_silent_connections_count_before_their_handshake(
    secure: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_TIMEOUT_SECONDS", 600)
    secure.http.close()
    eventually(lambda: accepted_connections(secure) == 0, lambda: f"{accepted_connections(secure)} are open")
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(secure)) for _ in range(SILENT)]
        eventually(
            lambda: sum(map(was_dropped, silent)) == SILENT - LIMIT, lambda: f"{accepted_connections(secure)} are open"
        )
        assert accepted_connections(secure) == LIMIT
    eventually(lambda: accepted_connections(secure) == 0, lambda: f"{accepted_connections(secure)} are open")


def test_silent_connections_that_are_too_many_cost_little(
    tmp_path: Path, engine: ScriptedEngine, cpu_bound: CpuBound
) -> None:
    """With a handshake under way each would have 50 KiB, as the system counts it, until that is given up."""
    files, trust = write_tls_files(tmp_path)
    options = "--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--connection-limit", str(LIMIT)
    with lone_gateway(tmp_path, engine, *options, trust=trust) as gateway, ExitStack() as stack:
        before = gateway.loop_seconds()
        silent = [stack.enter_context(connect_to(gateway.address)) for _ in range(SILENT)]
        eventually(
            lambda: sum(map(was_dropped, silent)) >= SILENT - LIMIT,
            lambda: f"{SILENT - sum(map(was_dropped, silent))} are open",
        )
        spent = gateway.loop_seconds() - before
        assert cpu_bound.holds(spent, SILENT_SECONDS), f"{spent:.3f} s of the loop"
        assert gateway.grown_bytes < SILENT_BYTES, f"grew by {gateway.grown_bytes} bytes"


def was_dropped(raw: socket.socket) -> bool:
    raw.setblocking(False)
    try:
        return raw.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_handshake_that_never_ends_is_given_up(secure: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_TIMEOUT_SECONDS", 0.2)
    with connect(secure) as silent, connect(secure) as talks_plainly:
        talks_plainly.sendall(b"GET / HTTP/1.1\r\n\r\n")
        eventually(lambda: was_dropped(silent) and was_dropped(talks_plainly), "they are still open")
    monkeypatch.setattr(tls_listener, "HANDSHAKE_TIMEOUT_SECONDS", 600)
    assert secure.http.get("/healthz").status_code == 200
    secure.http.close()
    eventually(lambda: accepted_connections(secure) == 0, lambda: f"{accepted_connections(secure)} are open")


def test_a_connection_stays_longer_than_its_client_keeps_it() -> None:
    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise AssertionError("nobody asks")

    client_seconds = httpx.Limits().keepalive_expiry
    assert client_seconds is not None
    assert BoundedConfig(app).timeout_keep_alive > client_seconds


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
def test_where_connections_are_full_the_longest_idle_makes_room_and_none_in_use_does(
    tmp_path: Path, engine: ScriptedEngine, is_secure: bool
) -> None:
    files, trust = write_tls_files(tmp_path)
    with (
        running_gateway(
            GatewaySettings(tmp_path / "e.json"), files if is_secure else None, trust if is_secure else True, LIMIT
        ) as gateway,
        ExitStack() as stack,
    ):
        gateway.serve(group(engine.url))
        gateway.http.close()
        eventually(lambda: open_connections(gateway) == 0, "the test's own are gone")

        def client() -> socket.socket:
            raw = connect(gateway)
            return stack.enter_context(trust.wrap_socket(raw, server_hostname="127.0.0.1") if is_secure else raw)

        working = client()
        working.sendall(GET[:-2])  # a request that has not ended: its connection is not idle
        idle = [client() for _ in range(LIMIT - 1)]
        for one in idle:
            ask(one)
        newcomers = [client() for _ in range(LIMIT - 2)]
        for one in newcomers:
            ask(one)
        assert [was_closed(one) for one in idle] == [True] * (LIMIT - 2) + [False], "the longest idle went first"
        working.sendall(GET[-2:])
        assert working.recv(12) == b"HTTP/1.1 200"
        assert open_connections(gateway) <= LIMIT


def ask(connection: socket.socket) -> None:
    """Send a request and read its whole answer."""
    connection.sendall(GET)
    assert read_answer(connection).startswith(b"HTTP/1.1 200")


def read_answer(connection: socket.socket) -> bytes:
    """All of one answer, which says its length; returns its head."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        received = connection.recv(65536)
        assert received, answer
        answer += received
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head


def was_closed(connection: socket.socket) -> bool:
    """Whether the other side has let go; one that has not says nothing more."""
    connection.settimeout(0.2)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture
def answering(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """A gateway that answers nobody's request well: what is sent has no type."""
    with running_gateway(GatewaySettings(tmp_path / "e.json")) as gateway:
        gateway.serve(group(engine.url))
        gateway.http.close()
        eventually(lambda: open_connections(gateway) == 0, "the test's own are gone")
        yield gateway


def refused_early(gateway: RunningGateway, stack: ExitStack, num_bytes: int) -> socket.socket:
    """A connection whose request has its answer, and none of its body."""
    raw = stack.enter_context(connect(gateway))
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % num_bytes)
    assert read_answer(raw).startswith(b"HTTP/1.1 415")
    return raw


@pytest.mark.parametrize("rest", [b"x", b"\r\n"], ids=["of the body", "blanks"])
def test_a_connection_does_not_live_on_what_follows_an_answer(
    answering: RunningGateway, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    """One byte now and then kept it open for ever, and never idle, so that nobody else had its place."""
    monkeypatch.setattr(http_protocol, "REST_SECONDS", 0.5)
    with ExitStack() as stack:
        raw = refused_early(answering, stack, 1_000_000 if rest == b"x" else 0)
        told = drip(raw, rest)
        assert told.startswith(b"HTTP/1.1 408") or told == b"", told
        eventually(lambda: open_connections(answering) == 0, lambda: f"{open_connections(answering)} are still held")


def drip(raw: socket.socket, rest: bytes) -> bytes:
    """Send `rest` again and again until the other side has something to say, or ends it."""
    raw.settimeout(0.02)
    for _ in range(3_000):
        try:
            raw.sendall(rest)
            return raw.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            return b""
    raise AssertionError("it was never ended")


def test_a_body_that_comes_after_its_answer_leaves_an_idle_connection(answering: RunningGateway) -> None:
    """It had no timer at all any more, and was never counted as idle."""
    config = answering.servers.public.config
    assert isinstance(config, BoundedConfig)
    with ExitStack() as stack:
        config.timeout_keep_alive = 600
        late = refused_early(answering, stack, 10)
        eventually(lambda: len(config.idle) == 1, "answered, and nothing of it is under way")
        late.sendall(b"x" * 5)
        eventually(lambda: not config.idle, "the rest comes")
        late.sendall(b"x" * 5)
        eventually(lambda: len(config.idle) == 1, "it has come")
        ask(late)
        config.timeout_keep_alive = 1
        closing = refused_early(answering, stack, 10)
        closing.sendall(b"x" * 10)
        eventually(lambda: open_connections(answering) == 1, lambda: f"{open_connections(answering)} are open")
        assert closing.recv(1) == b""


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (CHUNKED + b"0\r\nx: ", b"a" * 65536),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 10_000),
        (CHUNKED + b"1;x=", b"a" * 65536),
    ],
    ids=["a trailer without end", "trailers without number", "an extension of a chunk"],
)
def test_what_follows_a_body_is_bounded_like_headers(answering: RunningGateway, begin: bytes, piece: bytes) -> None:
    """The parser keeps a trailer to itself until it ends: a gigabyte, for all that bounded it."""
    with connect(answering) as raw:
        raw.sendall(begin)
        sent = 0
        with suppress(OSError):
            while sent < 256 * len(piece):
                raw.sendall(piece)
                sent += len(piece)
        assert sent < 64 * len(piece), f"{sent} bytes were taken"
        with suppress(OSError):
            assert raw.recv(65536).startswith(b"HTTP/1.1 431")
    eventually(lambda: open_connections(answering) == 0, lambda: f"{open_connections(answering)} are still held")


def test_a_large_body_may_come_in_one_read_with_its_head(answering: RunningGateway, engine: ScriptedEngine) -> None:
    """What the parser tells of is no header, however much of it comes at once."""
    body = b'{"model": "tiny", "prompt": "%s"}' % (b"x" * 1_000_000)
    with connect(answering) as raw:
        raw.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert read_answer(raw).startswith(b"HTTP/1.1 200"), engine.requests


def test_a_body_in_chunks_of_a_byte_is_refused_before_it_costs_much(
    answering: RunningGateway, cpu_bound: CpuBound
) -> None:
    """Four million chunks took the loop seconds."""
    before = answering.loop_seconds()
    with connect(answering) as raw:
        raw.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
        with suppress(OSError):
            for _ in range(4 * 1024):
                raw.sendall(b"1\r\n \r\n" * 1024)
        with suppress(OSError):
            assert raw.recv(65536).startswith(b"HTTP/1.1 400")
    eventually(lambda: open_connections(answering) == 0, lambda: f"{open_connections(answering)} are still held")
    spent = answering.loop_seconds() - before
    assert cpu_bound.holds(spent, 1.0), f"{spent:.3f} s of the loop"
