"""What the shipped rules cost a Prometheus that watches many models: `make bench-rules`.

A real Prometheus evaluates them as shipped. It scrapes every series that they read, of an installation whose every
second is scripted, and begins with as much of what they have recorded as their windows look back on. Once windows of
five minutes are full, it is asked how long each group of rules took. Every group's median must be under a second.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from boards.backfilled_prometheus import BackfilledPrometheus, running_prometheus, write_blocks
from boards.long_windows import blocks, remembered
from boards.rule_evaluations import Evaluations, medians, report, too_slow
from boards.rule_names import exported_in, shipped_rules
from boards.scripted_fleet import ScriptedFleet
from boards.scripted_moments import Clients, Group, Model, Moment
from stageline_dashboards.shipped import rule_paths

SCRAPE_SECONDS: Final = 30
WINDOW_SECONDS: Final = 5 * 60


class ScriptedPage:
    """What all processes of the installation export at this moment, of what the rules read."""

    def __init__(self, models: int) -> None:
        self._fleet = ScriptedFleet()
        self._moment = _moment(models)
        self._read = {name for rule in shipped_rules() for name in exported_in(rule["expr"])}
        self._told = time.time()
        self.series = 0
        self.body = b""
        """In Prometheus' text format, as of the last `refresh`."""
        self.refresh()

    def refresh(self) -> None:
        """Let the installation do what it has done since the last time; takes seconds where there are many models."""
        now = time.time()
        self._fleet.pass_time(self._moment, now - self._told, now)
        self._told = now
        history = self._fleet.history
        lines = [
            line.rsplit(" ", 1)[0]  # without the moment
            for family in history.lines.values()
            for line in family
            if line.partition("{")[0] in self._read
        ]
        history.lines.clear()
        self.series = len(lines)
        self.body = ("\n".join(lines) + "\n").encode()

    def refresh_until(self, is_over: threading.Event) -> None:
        """For a thread: once between two scrapes."""
        while not is_over.wait(SCRAPE_SECONDS / 2):
            self.refresh()


def _moment(models: int) -> Moment:
    group = Group(step_seconds=(0.02, 0.021), load=0.7, engaged=0.8)
    clients = Clients(requests={"200": 1.0, "429": 0.01, "500": 0.001, "499": 0.02}, in_flight=12)
    return {f"model-{index:03d}": Model(clients=clients, groups=(group,), stages=2) for index in range(models)}


@contextmanager
def served(page: ScriptedPage) -> Iterator[str]:
    """Serve the page on loopback; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.body
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    is_over = threading.Event()
    for task, arguments in ((server.serve_forever, ()), (page.refresh_until, (is_over,))):
        threading.Thread(target=task, args=arguments, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()


def evaluations(prometheus: BackfilledPrometheus, seconds: float) -> Evaluations:
    """All that take place for as long as asked."""
    found = Evaluations()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found.add(rule_groups(prometheus))
        time.sleep(5)
    return found


def rule_groups(prometheus: BackfilledPrometheus) -> list[dict[str, Any]]:
    """As Prometheus has them now."""
    said = prometheus.http.get("/api/v1/rules").json()
    assert said["status"] == "success", said
    return list(said["data"]["groups"])


def say(text: str) -> None:
    """At once, as a run takes minutes."""
    print(text, flush=True)  # noqa: T201


def main() -> None:
    """Measure and print; exit status 1 where a group took too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=500, help="two stages each, before two gateways")
    parser.add_argument("--burning", action="store_true", help="every model has missed all it was promised, for days")
    parser.add_argument("--minutes", type=float, default=6.0, help="of evaluations, once windows are full")
    options = parser.parse_args()
    page = ScriptedPage(options.models)
    with tempfile.TemporaryDirectory(prefix="stageline-rules-") as root, served(page) as address:
        data = Path(root) / "data"
        series = remembered(longer_than=WINDOW_SECONDS)
        say(f"writing the past of {len(series)} recorded series for each of {options.models} models")
        write_blocks(blocks(series, options.models, int(time.time()), burning=options.burning), data)
        with running_prometheus(data, configuration_for(address)) as prometheus:
            say("filling windows of five minutes")
            time.sleep(WINDOW_SECONDS + 2 * SCRAPE_SECONDS)
            found = evaluations(prometheus, options.minutes * 60)
    for line in report(found, page.series):
        say(line)
    sys.exit(bool(too_slow(medians(found.groups))))


def configuration_for(address: str) -> str:
    """One target for all processes, whose labels are on its page."""
    rules = "".join(f"  - {path}\n" for path in rule_paths())
    return (
        f"global: {{scrape_interval: {SCRAPE_SECONDS}s, scrape_timeout: {SCRAPE_SECONDS - 5}s}}\n"
        f"rule_files:\n{rules}"
        f"scrape_configs: [{{job_name: all, honor_labels: true, static_configs: [{{targets: ['{address}']}}]}}]\n"
    )


if __name__ == "__main__":
    main()
