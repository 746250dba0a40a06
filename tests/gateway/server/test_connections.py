"""What a connection may send and how long it may take: anything else gets an error in the API's form, or is dropped."""

import json
import re
import resource
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import Hold, Say, ScriptedEngine
from stageline_api.engine_http import Admitted, Delta
from stageline_api.errors import UserError
from stageline_gateway.command import _hosts
from stageline_gateway.server import http_protocol
from stageline_gateway.server.http_protocol import HEADER_LIMIT_BYTES
from stageline_gateway.server.tls import TlsFiles, new_context
from stageline_gateway.settings import GatewaySettings


@pytest.fixture
def patient_gateway(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """A gateway that gives up on slow readers soon."""
    settings = GatewaySettings(endpoints_path=tmp_path / "endpoints.json", send_timeout_seconds=0.5)
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        yield gateway


def connect(gateway: RunningGateway) -> socket.socket:
    url = httpx.URL(gateway.url)
    return socket.create_connection((url.host, url.port or 0), timeout=60)


def answer_to(gateway: RunningGateway, sent: bytes) -> tuple[int, Any]:
    """Status and error of the answer to raw bytes, after which the connection must be closed."""
    received = b""
    with connect(gateway) as raw:
        with suppress(ConnectionError):  # refused while it is still being sent
            raw.sendall(sent)
        with suppress(ConnectionResetError):  # the rest of what was sent was not read
            while chunk := raw.recv(65536):
                received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.1 (\d+) .+\r\n", head)
    assert found, received
    return int(found.group(1)), json.loads(body)["error"]


GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_http"),
        (GET + b"bad header\r\n\r\n", 400, "invalid_http"),
        (GET + b"x: a\x00b\r\n\r\n", 400, "invalid_http"),
        (GET + b"content-length: -1\r\n\r\n", 400, "invalid_http"),
        (GET + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "invalid_http"),
        (GET + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400, "invalid_http"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n", 400, "invalid_http"),
        (GET + b"x: " + b"a" * (HEADER_LIMIT_BYTES + 1) + b"\r\n\r\n", 431, "headers_too_large"),
        (GET + b"".join(b"x%d: aaaaaaaaaaaaaaaa\r\n" % i for i in range(2000)), 431, "headers_too_large"),
        (b"GET /" + b"a" * (HEADER_LIMIT_BYTES + 1), 431, "headers_too_large"),
        (GET + b"x: " + b"a" * (8 * HEADER_LIMIT_BYTES), 431, "headers_too_large"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_is_no_request_gets_an_error_in_json(gateway: RunningGateway, sent: bytes, status: int, code: str) -> None:
    answered, error = answer_to(gateway, sent)
    assert (answered, error["code"], error["type"]) == (status, code, "invalid_request_error")


def test_headers_that_never_end_are_given_up(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_SECONDS", 0.2)
    for sent in (b"", GET):
        assert answer_to(gateway, sent)[0] == 408


def test_a_second_request_on_a_connection_is_bounded_too(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(gateway) as raw:
        raw.sendall(GET + b"\r\n")
        first = b""
        while not first.endswith(b'{"status":"ok"}'):
            received = raw.recv(65536)
            assert received, first
            first += received
        monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_SECONDS", 0.3)
        raw.sendall(GET)
        assert b"408 Request Timeout" in raw.recv(65536)


def test_a_body_that_stalls_is_given_up(tmp_path: Path, engine: ScriptedEngine) -> None:
    with running_gateway(GatewaySettings(tmp_path / "e.json", body_timeout_seconds=0.2)) as gateway:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with connect(gateway) as raw:
            raw.sendall(head + b"content-length: 100\r\n\r\n{")
            assert b"408" in raw.recv(65536)
    assert engine.requests == []


def resident_bytes() -> int:
    """Memory of this process, the gateway's and the engine's too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_reader_that_stops_costs_bounded_memory_and_is_ended(
    patient_gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    """Hundreds of megabytes wait at the engine; the gateway holds back instead of taking them in, then gives up."""
    piece = Say(Delta(text="x" * 100_000, token_ids=(1,)))
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), *[piece] * 3000, Hold()]
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    before_bytes = resident_bytes()
    with connect(patient_gateway) as raw:
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        assert b"200 OK" in raw.recv(1000)
        highest_bytes = 0
        deadline = time.monotonic() + 60
        while not engine.left_early and time.monotonic() < deadline:
            highest_bytes = max(highest_bytes, resident_bytes())
            time.sleep(0.01)
        assert engine.left_early, "the request was not ended"
        assert highest_bytes - before_bytes < 64 * 1024 * 1024, f"grew by {highest_bytes - before_bytes} bytes"
        name = "stageline_gateway_slow_readers_total"
        eventually(lambda: patient_gateway.sample(name, model_name=MODEL) == 1, "not counted")
        [last] = deque(iter(lambda: raw.recv(1 << 20), b""), maxlen=1)
        assert b"[DONE]" not in last, "what the kernel still held, then the end"
    patient_gateway.settle()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def write_pair(files: TlsFiles, authority: trustme.CA) -> None:
    """A new certificate and key for this machine."""
    pair = authority.issue_cert("127.0.0.1")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    pair.private_key_pem.write_to_path(str(files.key))


def certificate_seen(gateway: RunningGateway, context: ssl.SSLContext) -> dict[str, Any]:
    with connect(gateway) as raw, context.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
        return dict(secure.getpeercert() or {})


def serial_seen(gateway: RunningGateway, context: ssl.SSLContext) -> Any:
    return certificate_seen(gateway, context)["serialNumber"]


def test_tls_with_a_certificate_that_changes(
    tmp_path: Path, engine: ScriptedEngine, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    write_pair(files, authority)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with running_gateway(GatewaySettings(tmp_path / "endpoints.json"), files, context) as gateway:
        assert gateway.url.startswith("https://")
        gateway.serve(group(engine.url))
        assert gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(gateway.url.replace("https", "http"), trust_env=False, timeout=60)
        first = serial_seen(gateway, context)
        expiry = ssl.cert_time_to_seconds(certificate_seen(gateway, context)["notAfter"])
        assert gateway.sample("stageline_gateway_tls_certificate_expiry_timestamp_seconds") == expiry
        assert gateway.sample("stageline_gateway_tls_stale") == 0
        files.key.write_text("not a key")
        eventually(lambda: "those read before stay in force" in caplog.text, "a bad key is not said")
        assert serial_seen(gateway, context) == first
        assert gateway.sample("stageline_gateway_tls_stale") == 1
        write_pair(files, authority)
        eventually(lambda: serial_seen(gateway, context) != first, "the new certificate is not used")
        assert gateway.http.get("/healthz").status_code == 200
        eventually(lambda: gateway.sample("stageline_gateway_tls_stale") == 0, "still called stale")


def test_whatever_goes_wrong_with_new_tls_files_the_old_pair_serves_on(
    tmp_path: Path, engine: ScriptedEngine, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    write_pair(files, authority)
    context = ssl.create_default_context()
    authority.configure_trust(context)

    looks: list[int] = []

    def broken(*_: object) -> None:
        looks.append(1)
        raise ZeroDivisionError  # what nobody thought of

    with running_gateway(GatewaySettings(tmp_path / "endpoints.json"), files, context) as gateway:
        gateway.serve(group(engine.url))
        first = serial_seen(gateway, context)
        for path in (files.certificate, files.key):
            path.unlink()
        eventually(lambda: gateway.sample("stageline_gateway_tls_stale") == 1, "nobody says that they are gone")
        assert serial_seen(gateway, context) == first
        with monkeypatch.context() as patched:
            patched.setattr(TlsFiles, "fingerprint", broken)
            eventually(lambda: looks, "nobody looks any more")  # no earlier look can be under way then
            write_pair(files, authority)
            seen = len(looks)
            eventually(lambda: len(looks) > seen, "nobody looks again")
            assert serial_seen(gateway, context) == first
        eventually(lambda: gateway.sample("stageline_gateway_tls_stale") == 0, "the watch has ended")
        eventually(lambda: serial_seen(gateway, context) != first, "the new certificate is not used")


@pytest.mark.parametrize("broken", ["certificate", "key", "both absent"])
def test_unusable_tls_files_are_said_at_the_start(tmp_path: Path, authority: trustme.CA, broken: str) -> None:
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    if broken != "both absent":
        write_pair(files, authority)
        (files.certificate if broken == "certificate" else files.key).write_text("broken")
    with pytest.raises(UserError, match="certificate and key can't be used"):
        new_context(files)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"127.0.0.1:8000", 200),
        (b"localhost", 200),
        (b"[::1]:8000", 200),
        (b"LLM.example:8000", 200),
        (b"evil.example", 421),
        (b"127.0.0.1.evil.example", 421),
        (b"", 421),
    ],
)
def test_a_page_can_not_point_its_own_name_at_a_gateway_without_keys(tmp_path: Path, host: bytes, status: int) -> None:
    settings = GatewaySettings(tmp_path / "e.json", hosts=frozenset({"llm.example"}))
    with running_gateway(settings) as gateway, connect(gateway) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nconnection: close\r\nhost: " + host + b"\r\n\r\n")
        told = b"".join(iter(lambda: raw.recv(65536), b""))
    assert told.startswith(b"HTTP/1.1 %d " % status), told
    assert (b"foreign_host" in told) == (status == 421), told


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1:8081", 200), ("localhost", 200), ("llm.example", 200), ("evil.example", 421)]
)
def test_nor_at_the_port_for_operators_of_this_machine(tmp_path: Path, host: str, status: int) -> None:
    """It asks for no key ever, and a page of that name would be let to read what it says."""
    settings = GatewaySettings(tmp_path / "e.json", hosts=frozenset({"llm.example"}))
    with running_gateway(settings) as gateway:
        assert gateway.admin.get("/status", headers={"host": host}).status_code == status


def test_a_gateway_of_this_machine_alone_answers_to_no_other_name_by_default() -> None:
    assert _hosts((), "127.0.0.1", None) == frozenset()
    assert _hosts((), "0.0.0.0", None) is None
    assert _hosts((), "127.0.0.1", Path("keys.yaml")) is None
    assert _hosts(("LLM.example",), "0.0.0.0", None) == frozenset({"llm.example"})
