"""Stands in for the command `stageline` inside containers: no model, but the same env, endpoints and manners.

Run as `fake_stageline.py prepare|stage|engine|gateway`. A stage whose `crash-<stage>` file exists in the cache's
parent writes that file's text as its last words and exits with the code in the file's first line.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CLOCK = """stageline_stage_busy_seconds_total{kind="decode"} 3.0
stageline_stage_wait_seconds_total{reason="recv"} 1.0
"""


def stage_status() -> dict[str, Any]:
    """A `StageStatus`."""
    stage = int(os.environ["STAGELINE_STAGE_INDEX"])
    return {
        "phase": "Ready",
        "stage": stage,
        "stage_count": int(os.environ["STAGELINE_STAGE_COUNT"]),
        "incarnation": int(os.environ["STAGELINE_INCARNATION"]),
        "layers": {"first": stage * 10, "last": stage * 10 + 9},
        "memory_bytes": 1 << 20,
    }


def serve(host: str, port: int, answers: dict[str, Any], key: str = "") -> None:
    """Answer GET and POST by path until a SIGTERM; a callable answer is (status, JSON value).

    With `key` all but probes must show it.
    """
    server = make_server(host, port, answers, key)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    server.server_close()


def make_server(host: str, port: int, answers: dict[str, Any], key: str = "") -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_probe = self.path in ("/healthz", "/readyz")
            if key and not is_probe and self.headers.get("Authorization") != f"Bearer {key}":
                self.send_error(401)
                return
            answer = answers.get(self.path)
            status, value = answer() if callable(answer) else (200 if answer is not None else 404, answer)
            body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer((host, port), Handler)


def crash_if_told() -> None:
    """Die as a stage does that has something to say."""
    config = json.loads(Path(os.environ["STAGELINE_CONFIG"]).read_text())
    order = Path(config["cache_dir"]) / f"crash-{os.environ['STAGELINE_STAGE_INDEX']}"
    if order.exists():
        code, _, words = order.read_text().partition("\n")
        Path(os.environ["STAGELINE_TERMINATION_PATH"]).write_text(words)
        sys.exit(int(code))


def main() -> None:
    """Play one role."""
    role = sys.argv[1]
    if role == "prepare":
        sys.stdout.write(f"preparing {os.environ['STAGELINE_CONFIG']}\n")
    elif role == "stage":
        crash_if_told()
        answers = {"/healthz": {}, "/readyz": {}, "/status": lambda: (200, stage_status()), "/metrics": CLOCK}
        serve(os.environ["STAGELINE_POD_IP"], 9100, answers)
    elif role == "engine":
        status = {"phase": "Ready", "served_name": "tiny", "generation_tokens_total": 7}
        drained = Path(json.loads(Path(os.environ["STAGELINE_CONFIG"]).read_text())["cache_dir"]) / "drained"
        host, answers = os.environ["STAGELINE_POD_IP"], {"/healthz": {}, "/readyz": {}, "/status": status}
        state = make_server(host, 8002, answers)
        threading.Thread(target=state.serve_forever, daemon=True).start()
        answers = answers | {"/v1/drain": lambda: (202, drained.write_text("yes") and status)}
        serve(host, 8000, answers, os.environ["STAGELINE_ENGINE_KEYS"])
    elif role == "gateway":
        parser = argparse.ArgumentParser()
        parser.add_argument("--host")
        parser.add_argument("--port", type=int)
        parser.add_argument("--endpoints", type=Path)
        parser.add_argument("--drain-seconds", type=float)
        given = parser.parse_args(sys.argv[2:])
        serve(given.host, given.port, {"/readyz": {}, "/endpoints": lambda: (200, given.endpoints.read_text())})
    else:
        time.sleep(600)


if __name__ == "__main__":
    main()
