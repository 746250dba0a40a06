"""Slashes behind paths, HEAD, HTTP/1.0, and web pages of other origins."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from click.testing import CliRunner

from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Drop, Say, ScriptedEngine, Step
from stageline_api.engine_http import Admitted, Delta
from stageline_gateway.command import gateway as command
from stageline_gateway.origins import check_listed_origin, is_origin
from stageline_gateway.settings import GatewaySettings

USER = [{"role": "user", "content": "Hi"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
PAGE = "https://chat.example.org"


def raw(gateway: RunningGateway, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of what is answered until the connection ends."""
    there = urlsplit(gateway.url)
    with socket.create_connection((str(there.hostname), there.port or 0), timeout=60) as client:
        client.sendall(request)
        answered = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answered.partition(b"\r\n\r\n")
    return head.lower(), body


def post(path: str, **fields: Any) -> bytes:
    body = json.dumps(ASKS[path] | {"model": MODEL} | fields).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("slashes", ["/", "//"])
def test_a_slash_behind_a_path_changes_nothing(gateway: RunningGateway, path: str, slashes: str) -> None:
    for stream in (False, True):
        answered = gateway.http.post(path + slashes, json=ASKS[path] | {"model": MODEL, "stream": stream})
        assert (answered.status_code, answered.history) == (200, [])
        assert "Hello" in answered.text


def test_other_routes_are_found_with_a_slash_too(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.replies["POST /v1/tokenize"] = 200, '{"token_ids": [1], "max_model_len": 8}'
    count = gateway.http.post("/v1/messages/count_tokens/", json={"model": MODEL, "messages": USER})
    assert count.json() == {"input_tokens": 1}
    for path in ("/v1/models/", f"/v1/models/{MODEL}/", "/healthz/", "/"):
        assert gateway.http.get(path).status_code == 200, path
    assert gateway.admin.get("/metrics/").status_code == 200


def test_head_is_answered_where_get_is(gateway: RunningGateway) -> None:
    for http, paths in (
        (gateway.http, ("/", "/health", "/healthz", "/readyz", "/v1/models", f"/v1/models/{MODEL}", "/openapi.json")),
        (gateway.admin, ("/metrics", "/healthz")),
    ):
        for path in paths:
            got, headed = http.get(path), http.head(path)
            assert (headed.status_code, headed.content) == (200, b""), path
            assert headed.headers["content-length"] == got.headers["content-length"] or path == "/metrics"
    assert gateway.http.head("/v1/models/absent").status_code == 404
    assert gateway.http.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("path", ASKS)
def test_http_1_0_gets_no_chunks(gateway: RunningGateway, path: str) -> None:
    head, body = raw(gateway, post(path, stream=True))
    assert head.startswith(b"http/1.1 200"), head
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert b"Hello" in body
    assert body.startswith((b"data: ", b"event: "))
    assert body.endswith(b"\n\n")
    whole_head, whole = raw(gateway, post(path))
    assert b"transfer-encoding" not in whole_head
    assert json.loads(whole)
    gateway.settle()


@pytest.mark.parametrize("path", ASKS)
def test_http_1_0_hears_of_an_answer_that_breaks(gateway: RunningGateway, engine: ScriptedEngine, path: str) -> None:
    begun: list[Step] = [Say(Admitted(prompt_tokens=3)), Say(Delta(text="Hello", token_ids=(1,))), Drop()]
    engine.script = lambda _: begun
    head, body = raw(gateway, post(path, stream=True))
    assert b"transfer-encoding" not in head
    assert (b"Hello" in body, b"[DONE]" in body) == (True, False)
    assert b"error" in body.rpartition(b"data: ")[2]


@pytest.fixture(params=[(PAGE, "http://localhost:3000"), ("*",)], ids=["listed", "any"])
def open_gateway(tmp_path: Path, engine: ScriptedEngine, request: pytest.FixtureRequest) -> Iterator[RunningGateway]:
    """A gateway that lets web pages in, with keys."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - name: one\n    key: a-key-of-sixteen-or-more\n")
    settings = GatewaySettings(tmp_path / "endpoints.json", keys_path=keys, cors_origins=request.param)
    with running_gateway(settings) as gateway:
        gateway.http.headers["authorization"] = "Bearer a-key-of-sixteen-or-more"
        gateway.serve(group(engine.url))
        yield gateway


def allowed(answered: httpx.Response) -> str | None:
    origin: str | None = answered.headers.get("access-control-allow-origin")
    return origin


@pytest.mark.parametrize("path", ASKS)
def test_pages_of_listed_origins_may_ask(open_gateway: RunningGateway, path: str) -> None:
    http = open_gateway.http
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    del http.headers["authorization"]  # a browser asks first without it
    preflight = http.options(path, headers=asks)
    assert preflight.status_code == 204
    assert allowed(preflight) in (PAGE, "*")
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    refused = http.post(path, json={}, headers={"origin": PAGE})
    assert (refused.status_code, allowed(refused)) == (401, allowed(preflight))
    http.headers["authorization"] = "Bearer a-key-of-sixteen-or-more"
    for stream in (False, True):
        fields = ASKS[path] | {"model": MODEL, "stream": stream}
        answered = http.post(path, json=fields, headers={"origin": PAGE})
        assert (answered.status_code, allowed(answered)) == (200, allowed(preflight))
        assert "x-request-id" in answered.headers["access-control-expose-headers"]
        assert allowed(http.post(path, json=fields)) is None
    assert allowed(http.post(path, json={}, headers={"origin": PAGE})) == allowed(preflight)
    assert allowed(http.get("/v1/models", headers={"origin": PAGE})) == allowed(preflight)


def test_other_origins_are_not_let_in(gateway: RunningGateway, open_gateway: RunningGateway) -> None:
    for origin in ("https://evil.example", PAGE + ".evil.example", "null"):
        asks = {"origin": origin, "access-control-request-method": "POST"}
        closed = gateway.http.options("/v1/completions", headers=asks)
        assert (closed.status_code, allowed(closed)) == (405, None)
        opened = open_gateway.http.options("/v1/completions", headers=asks)
        assert (opened.status_code, allowed(opened)) in ((405, None), (204, "*"))


@pytest.mark.parametrize(
    "origin",
    [
        "https://chat.example.org/",
        "chat.example.org",
        "https://*.example.org",
        "https://münchen.example",
        "https://user@chat.example.org",
        "https://chat.example.org?a",
        "https://chat.example.org:",
        "https://chat.example.org:70000",
        "https://[chat]",
    ],
)
def test_what_is_no_origin_is_a_usage_error(origin: str) -> None:
    words = refusal_of(origin)
    assert f"'{origin}' must be * or scheme://host[:port]" in words


@pytest.mark.parametrize(
    ("origin", "sent"),
    [
        ("HTTP://X", "http://x"),
        ("https://Chat.Example.org", "https://chat.example.org"),
        ("https://a.b:443", "https://a.b"),
        ("http://a.b:80", "http://a.b"),
        ("https://a.b:0443", "https://a.b"),
        ("https://A.b:08443", "https://a.b:8443"),
        ("https://[2001:DB8::1]:443", "https://[2001:db8::1]"),
        ("Tauri://localhost", "tauri://localhost"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused_with_the_one_that_it_sends(origin: str, sent: str) -> None:
    words = refusal_of(origin)
    assert f"'{origin}' matches no request, as browsers send '{sent}': write '{sent}'" in words
    check_listed_origin(sent)


def refusal_of(origin: str) -> str:
    done = CliRunner().invoke(command, ["--endpoints", "e.json", "--cors-origin", origin])
    assert done.exit_code == 2, done.output
    assert "--cors-origin" in done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "https://chat.example.org",
        "http://localhost:3000",
        "https://a.b:80",
        "http://a.b:443",
        "http://[::1]:8080",
        "https://xn--mnchen-3ya.example",
        "chrome-extension://abcdefghijklmnop",
        "capacitor://localhost",
    ],
)
def test_origins_as_browsers_send_them_may_be_listed(origin: str) -> None:
    check_listed_origin(origin)
    assert is_origin(origin)
