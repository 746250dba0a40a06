"""`stageline gateway` as a process before a scripted engine."""

import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from processes.gateway_harness import eventually, group, write_endpoints
from processes.scripted_engine import ScriptedEngine

COMMAND: Final = [sys.executable, "-m", "stageline_gateway"]


@contextmanager
def gateway_process(
    tmp_path: Path,
    engine: ScriptedEngine,
    *options: str,
    under: tuple[str, ...] = (),
    program: tuple[str, ...] = tuple(COMMAND),
    trust: ssl.SSLContext | bool = True,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway before `engine`, with its URL; killed when the test leaves it running.

    It answers, and so it hears signals: it says where it listens before it does either.
    """
    endpoints, log = tmp_path / "endpoints.json", tmp_path / "gateway.log"
    write_endpoints(endpoints, group(engine.url))
    command = [*under, *program, "--port", "0", "--endpoints", str(endpoints), *options]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, text=True)
    try:
        eventually(lambda: "listening on" in log.read_text() or process.poll() is not None, log.read_text)
        found = re.search(r"listening on (https?://\S+)", log.read_text())
        assert found, log.read_text()
        answered = httpx.get(f"{found.group(1)}/healthz", trust_env=False, timeout=120, verify=trust)
        assert answered.status_code == 200
        yield process, found.group(1)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
