"""The stage's health endpoint on its own address: `/healthz`, `/readyz`, `/status`, `/metrics`, `/timeline`.

Served by a thread from what the main thread has written down; it never asks the pipeline and so answers while a step
runs. Where the stage has several ranks, each answers its supervisor on a socket of its own, and the supervisor
everybody else.
"""

import logging
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs

from stageline_api import ports
from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_runtime.stage.ranks.account import RankAccount
from stageline_runtime.stage.telemetry.metrics import StageMetrics
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.termination import RuntimeFailure

logger = logging.getLogger(__name__)


def health_url(pod_ip: str) -> str:
    host = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
    return f"http://{host}:{ports.STAGE_HEALTH}"


class HealthPages(Protocol):
    """What is answered, as JSON unless said otherwise. For any thread."""

    def phase(self) -> Phase:
        """Where the stage is in its life."""

    def status(self) -> bytes:
        """A `StageStatus`."""

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that the header `accept` asks for, and its content type."""

    def timeline(self, since_seq: int) -> bytes:
        """A `TimelinePage` of the steps after plan `since_seq`."""

    def account(self) -> bytes | None:
        """A `RankAccount`, from one rank of several to its supervisor; else None."""


class StagePages:
    """The pages of this process."""

    def __init__(self, progress: StageProgress, metrics: StageMetrics) -> None:
        self._progress = progress
        self._metrics = metrics

    def phase(self) -> Phase:
        return self._progress.phase

    def status(self) -> bytes:
        return self._progress.status().model_dump_json().encode()

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return self._metrics.page(accept)

    def timeline(self, since_seq: int) -> bytes:
        return self._progress.timeline_page(since_seq).model_dump_json().encode()

    def account(self) -> bytes | None:
        return RankAccount.of(self._progress).model_dump_json().encode() if self._progress.is_rank else None


@contextmanager
def health_served(host: str, pages: HealthPages, listener: socket.socket | None = None) -> Iterator[None]:
    """Answer on the health port of this address, or on `listener`, for as long as the block runs.

    Raises:
        RuntimeFailure: class Internal, when the port can't be had.
    """
    try:
        health = HealthServer(host, ports.STAGE_HEALTH, pages, listener)
    except OSError as error:
        detail = f"can't listen on {host}:{ports.STAGE_HEALTH}: {error.strerror}"
        raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error
    health.start()
    try:
        yield
    finally:
        health.close()


class HealthServer:
    def __init__(self, host: str, port: int, pages: HealthPages, listener: socket.socket | None = None) -> None:
        self._server = _Server((host, port), pages, listener)
        self._closing, is_closing = socket.socketpair()
        self._thread = threading.Thread(target=self._server.serve_until, args=(is_closing,), name="health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.close()
        if self._thread.is_alive():
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """The listening socket, and what its handlers answer from."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], pages: HealthPages, listener: socket.socket | None) -> None:
        self.pages = pages
        super().__init__(address, _Handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener

    def handle_error(self, *_asked: Any) -> None:
        """The client may have closed before the answer; the traceback of any other error is logged."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("a request for the stage's health failed")

    def serve_until(self, is_closing: socket.socket) -> None:
        """Answer until `is_closing` ends. `serve_forever` would look for that twice a second, and a stage's end, which
        others wait for to learn of it, waits for this one."""
        with is_closing, selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(is_closing, selectors.EVENT_READ)
            while all(key.fileobj is self for key, _ in selector.select()):
                self.handle_request()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10
    server: _Server

    def do_GET(self) -> None:
        pages = self.server.pages
        path, _, query = self.path.partition("?")
        match path:
            case "/healthz":
                self._answer_phase(phase := pages.phase(), is_well=phase is not Phase.FAILED)
            case "/readyz":
                self._answer_phase(phase := pages.phase(), is_well=phase is Phase.READY)
            case "/status":
                self._answer(HTTPStatus.OK, pages.status(), "application/json")
            case "/metrics":
                self._answer(HTTPStatus.OK, *pages.metrics(self.headers.get("Accept", "")))
            case "/timeline":
                self._answer_timeline(query)
            case "/account" if (account := pages.account()) is not None:
                self._answer(HTTPStatus.OK, account, "application/json")
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"not found")

    def _answer_phase(self, phase: Phase, *, is_well: bool) -> None:
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, phase.value.encode())

    def _answer_timeline(self, query: str) -> None:
        given = parse_qs(query).get("since_seq", ["-1"])[-1]
        try:
            since_seq = int(given)
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, f"since_seq={given[:40]!r} is not an integer".encode())
            return
        self._answer(HTTPStatus.OK, self.server.pages.timeline(since_seq), "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's signature
        """Probes come every second; they are not worth a line."""
