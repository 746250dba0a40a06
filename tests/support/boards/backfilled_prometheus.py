"""A real Prometheus over a past that was written for it, which scrapes only what it is told to; gone with the test.

Nothing is mocked: promtool makes blocks of the text, and the server answers queries from them as it would for Grafana.
"""

import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from boards.promtool import PROMTOOL, promtool
from processes.free_ports import free_port

PROMETHEUS: Final = shutil.which("prometheus")
needs_prometheus: Final = pytest.mark.skipif(
    not (PROMETHEUS and PROMTOOL),
    reason="Prometheus is not installed: apt-get install --no-install-recommends prometheus",
)
READY_SECONDS: Final = 150.0


@dataclass(frozen=True, slots=True)
class BackfilledPrometheus:
    """Its HTTP API, as Grafana's data source uses it."""

    http: httpx.Client

    def between(self, expr: str, start: float, end: float, step_seconds: float) -> list[dict[str, Any]]:
        """Series of a range query: `metric` and `values`, pairs of time and text."""
        parameters = {"query": expr, "start": start, "end": end, "step": step_seconds}
        return list(self._ask("query_range", parameters)["result"])

    def at(self, expr: str, moment: float) -> list[dict[str, Any]]:
        """Series of an instant query, in the form of a range query with one value."""
        found = self._ask("query", {"query": expr, "time": moment})["result"]
        return [{"metric": each["metric"], "values": [each["value"]]} for each in found]

    def label_values(self, selector: str, label: str, start: float, end: float) -> list[str]:
        """Values of a label on the series that a selector finds."""
        return list(self._ask(f"label/{label}/values", {"match[]": selector, "start": start, "end": end}))

    def exemplars(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        """Series that the selectors of `expr` find: `seriesLabels` and `exemplars`."""
        return list(self._ask("query_exemplars", {"query": expr, "start": start, "end": end}))

    def _ask(self, path: str, parameters: Mapping[str, Any]) -> Any:
        said = self.http.get(f"/api/v1/{path}", params=dict(parameters)).json()
        assert said["status"] == "success", f"{path} {parameters}: {said.get('error')}"
        return said["data"]


def write_blocks(texts: Iterable[str], directory: Path) -> None:
    """Add OpenMetrics texts to a data directory."""
    for text in texts:
        source = directory.parent / "history.om"
        source.write_text(text, encoding="utf-8")
        promtool("tsdb", "create-blocks-from", "openmetrics", source, directory)


@contextmanager
def running_prometheus(
    directory: Path, configuration: str = "global: {}\n", *more_options: str
) -> Iterator[BackfilledPrometheus]:
    """Serve a data directory on loopback."""
    assert PROMETHEUS is not None
    config, log = directory.parent / "prometheus.yml", directory.parent / "prometheus.log"
    config.write_text(configuration, encoding="utf-8")
    port = free_port()
    options = (f"--config.file={config}", f"--storage.tsdb.path={directory}", "--storage.tsdb.retention.time=100y")
    with log.open("wb") as output:
        command = [PROMETHEUS, *options, *more_options, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60.0) as http:
            _wait_until_ready(http, process, log)
            yield BackfilledPrometheus(http)
    finally:
        process.terminate()
        process.wait(timeout=READY_SECONDS)


def _wait_until_ready(http: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if http.get("/-/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"Prometheus did not get ready: {log.read_text(encoding='utf-8')[-2000:]}")
