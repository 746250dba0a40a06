"""The stage's health endpoint on its own address: `/healthz`, `/readyz`, `/status`, `/metrics`, `/timeline`.

Served by a thread from what the main thread has written down; it never asks the pipeline and so answers while a step
runs.
"""

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from stageline_api import ports
from stageline_api.health import Phase
from stageline_runtime.stage.telemetry.metrics import StageMetrics
from stageline_runtime.stage.telemetry.progress import StageProgress


def health_url(pod_ip: str) -> str:
    host = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
    return f"http://{host}:{ports.STAGE_HEALTH}"


class HealthServer:
    def __init__(self, host: str, port: int, progress: StageProgress, metrics: StageMetrics) -> None:
        self._server = _Server((host, port), progress, metrics)
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """The listening socket, and what its handlers answer from."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], progress: StageProgress, metrics: StageMetrics) -> None:
        self.progress = progress
        self.metrics = metrics
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10
    server: _Server

    def do_GET(self) -> None:
        progress = self.server.progress
        path, _, query = self.path.partition("?")
        match path:
            case "/healthz":
                self._answer_phase(is_well=progress.phase is not Phase.FAILED)
            case "/readyz":
                self._answer_phase(is_well=progress.phase is Phase.READY)
            case "/status":
                self._answer(HTTPStatus.OK, progress.status().model_dump_json().encode(), "application/json")
            case "/metrics":
                self._answer(HTTPStatus.OK, *self.server.metrics.page(self.headers.get("Accept", "")))
            case "/timeline":
                self._answer_timeline(query)
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"not found")

    def _answer_phase(self, *, is_well: bool) -> None:
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, self.server.progress.phase.value.encode())

    def _answer_timeline(self, query: str) -> None:
        given = parse_qs(query).get("since_seq", ["-1"])[-1]
        try:
            since_seq = int(given)
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, f"since_seq={given[:40]!r} is not an integer".encode())
            return
        body = self.server.progress.timeline_page(since_seq).model_dump_json().encode()
        self._answer(HTTPStatus.OK, body, "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's signature
        """Probes come every second; they are not worth a line."""
