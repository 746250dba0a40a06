"""A loopback server that speaks as much of the Hub's HTTP API as downloading one repository takes."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from processes.loopback_server import loopback_server

PAUSE_SECONDS = 250.0
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """One repository and how the server behaves. Fields may be changed while it runs."""

    repo: str
    directory: Path
    branch: str = "main"
    token: str | None = None
    """When set, requests without it are refused as the Hub refuses a private repository."""
    gated: bool = False
    break_once: str | None = None
    """Name of a file whose first transfer ends in the middle."""
    corrupt: str | None = None
    """Name of a file that is sent with one byte changed."""
    pause_in: str | None = None
    """Name of a file whose transfers stop in the middle until `go_on` is set."""
    go_on: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method (`PEEK`: a GET of a part with an end), path and Authorization header of every request."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        mark = "/resolve/"
        return [
            path.split(mark)[1].split("/", 1)[1]
            for method, path, _ in self.requests
            if method == "GET" and mark in path
        ]


@contextmanager
def running_hub(hub: FakeHub) -> Iterator[str]:
    """Serve the repository; gives the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _respond(self, hub)

        def do_HEAD(self) -> None:
            _respond(self, hub)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    with loopback_server(Handler) as url:
        yield url


def _respond(handler: BaseHTTPRequestHandler, hub: FakeHub) -> None:
    path = unquote(urlsplit(handler.path).path)
    authorization = handler.headers.get("Authorization")
    is_part = re.fullmatch(r"bytes=\d+-\d+", handler.headers.get("Range") or "", flags=re.IGNORECASE)
    with hub.lock:
        hub.requests.append(("PEEK" if is_part else handler.command, path, authorization))
    if not (path.startswith((f"/api/models/{hub.repo}", f"/{hub.repo}/resolve/"))):
        return _refuse(handler, 404, "RepoNotFound")
    if hub.token is not None and authorization != f"Bearer {hub.token}":
        return _refuse(handler, 401, "RepoNotFound")
    if hub.gated:
        return _refuse(handler, 403, "GatedRepo")
    if path.startswith("/api/models/"):
        revision = path.removeprefix(f"/api/models/{hub.repo}").removeprefix("/revision/") or hub.branch
        return _send_info(handler, hub) if revision == hub.branch else _refuse(handler, 404, "RevisionNotFound")
    revision, _, name = path.removeprefix(f"/{hub.repo}/resolve/").partition("/")
    if revision != COMMIT:
        return _refuse(handler, 404, "RevisionNotFound")
    return _send_file(handler, hub, name)


def _send_info(handler: BaseHTTPRequestHandler, hub: FakeHub) -> None:
    siblings = []
    for file in sorted(path for path in hub.directory.rglob("*") if path.is_file()):
        content = file.read_bytes()
        sibling: dict[str, Any] = {
            "rfilename": str(file.relative_to(hub.directory)),
            "size": len(content),
            "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest(),
        }
        if file.suffix == ".safetensors":
            sha256 = hashlib.sha256(content).hexdigest()
            sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
        siblings.append(sibling)
    body = json.dumps({"id": hub.repo, "modelId": hub.repo, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
    _send(handler, 200, body, {"Content-Type": "application/json"})


def _send_file(handler: BaseHTTPRequestHandler, hub: FakeHub, name: str) -> None:
    file = hub.directory / name
    if not file.is_file():
        return _refuse(handler, 404, "EntryNotFound")
    content = file.read_bytes()
    headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
    if name == hub.corrupt:
        content = bytes([*content[:-1], content[-1] ^ 1])
    start, status = 0, 200
    if (asked := handler.headers.get("Range", "")).startswith("bytes=") and asked != "bytes=0-":
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, status = int(first), 206
        content = content[: int(last) + 1] if last else content
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    with hub.lock:
        breaks = handler.command == "GET" and hub.break_once == name
        hub.break_once = None if breaks else hub.break_once
    pause = hub.go_on if hub.pause_in == name else None
    return _send(handler, status, content[start:], headers, breaks=breaks, pause=pause)


def _refuse(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
    _send(handler, status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})


def _send(
    handler: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: dict[str, str],
    *,
    breaks: bool = False,
    pause: threading.Event | None = None,
) -> None:
    handler.send_response(status)
    for key, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command == "HEAD":
        return
    half = len(body) // 2
    with contextlib.suppress(ConnectionError):  # a client that was killed meanwhile
        handler.wfile.write(body[:half])
        if pause is not None:
            pause.wait(PAUSE_SECONDS)
        if breaks:
            handler.close_connection = True
        else:
            handler.wfile.write(body[half:])
