"""What the shipped rules cost a Prometheus that watches many models: `make bench-rules`.

A real Prometheus evaluates them as shipped. It scrapes every series that they read, of an installation whose every
second is scripted, and begins with days of what the long windows add up, recorded every 30 s as the rules themselves
do. Once windows of five minutes are full, it is asked how long each group of rules took; the medians are printed.
"""

import argparse
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from boards.backfilled_prometheus import BackfilledPrometheus, running_prometheus, write_blocks
from boards.metric_history import written
from boards.rule_names import exported_in, shipped_rules
from boards.scripted_fleet import NAMESPACE, ScriptedFleet
from boards.scripted_moments import Clients, Group, Model, Moment
from stageline_dashboards.shipped import rule_paths

SCRAPE_SECONDS: Final = 30
RECORDED_EVERY_SECONDS: Final = 30
WINDOW_SECONDS: Final = 5 * 60
BLOCK_SECONDS: Final = 2 * 3600
"""What promtool makes one block of."""
AT_MOST_SECONDS: Final = 1.0


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


def recorded_for_days() -> list[str]:
    """Names of what rules add up over hours and days, in steps of five minutes."""
    found = (re.findall(r"sum_over_time\(([\w:]+)\[\w+:5m\]\)", rule["expr"]) for rule in shipped_rules())
    return sorted({name for names in found for name in names})


def history(models: int, days: float, until: float) -> Iterator[str]:
    """OpenMetrics texts, one for each block."""
    first = int((until - days * 86400) // BLOCK_SECONDS) * BLOCK_SECONDS
    for begin in range(first, int(until), BLOCK_SECONDS):
        moments = range(begin, min(begin + BLOCK_SECONDS, int(until)), RECORDED_EVERY_SECONDS)
        yield "".join(_block(models, moments)) + "# EOF\n"


def _block(models: int, moments: range) -> Iterator[str]:
    for name in recorded_for_days():
        yield f"# TYPE {name} gauge\n"
        for index in range(models):
            series = written(name, (("namespace", NAMESPACE), ("model_name", f"model-{index:03d}")))
            yield "".join(f"{series} {1 + (moment // 30) % 7 / 100} {moment}\n" for moment in moments)


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


def evaluations(prometheus: BackfilledPrometheus, seconds: float) -> Mapping[str, list[float]]:
    """Seconds that each evaluation of each group took, for as long as asked."""
    took: dict[str, dict[str, float]] = defaultdict(dict)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for group in rule_groups(prometheus):
            if not group["lastEvaluation"].startswith("0001"):
                took[group["name"]][group["lastEvaluation"]] = group["evaluationTime"]
        time.sleep(5)
    return {name: list(found.values()) for name, found in took.items()}


def rule_groups(prometheus: BackfilledPrometheus) -> list[dict[str, Any]]:
    """As Prometheus has them now."""
    said = prometheus.http.get("/api/v1/rules").json()
    assert said["status"] == "success", said
    return list(said["data"]["groups"])


def slowest_rules(prometheus: BackfilledPrometheus, count: int) -> list[tuple[float, str]]:
    """Seconds of each rule's last evaluation, and its name."""
    rules = [(rule["evaluationTime"], rule["name"]) for group in rule_groups(prometheus) for rule in group["rules"]]
    return sorted(rules, reverse=True)[:count]


def say(text: str) -> None:
    """At once, as a run takes minutes."""
    print(text, flush=True)  # noqa: T201


def main() -> None:
    """Measure and print; exit status 1 where all groups together took too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=500, help="two stages each, before two gateways")
    parser.add_argument("--days", type=float, default=3.0, help="of recorded history")
    parser.add_argument("--minutes", type=float, default=6.0, help="of evaluations, once windows are full")
    options = parser.parse_args()
    page = ScriptedPage(options.models)
    with tempfile.TemporaryDirectory(prefix="stageline-rules-") as root, served(page) as address:
        data = Path(root) / "data"
        say(
            f"writing {options.days:g} days of {len(recorded_for_days())} recorded series "
            f"for each of {options.models} models"
        )
        write_blocks(history(options.models, options.days, time.time()), data)
        with running_prometheus(data, configuration_for(address)) as prometheus:
            say("filling windows of five minutes")
            time.sleep(WINDOW_SECONDS + 2 * SCRAPE_SECONDS)
            took = evaluations(prometheus, options.minutes * 60)
            slowest = slowest_rules(prometheus, 5)
    report(took, slowest, page.series)
    sys.exit(sum(statistics.median(found) for found in took.values()) > AT_MOST_SECONDS)


def configuration_for(address: str) -> str:
    """One target for all processes, whose labels are on its page."""
    rules = "".join(f"  - {path}\n" for path in rule_paths())
    return (
        f"global: {{scrape_interval: {SCRAPE_SECONDS}s, scrape_timeout: {SCRAPE_SECONDS - 5}s}}\n"
        f"rule_files:\n{rules}"
        f"scrape_configs: [{{job_name: all, honor_labels: true, static_configs: [{{targets: ['{address}']}}]}}]\n"
    )


def report(took: Mapping[str, list[float]], slowest: list[tuple[float, str]], series: int) -> None:
    """Print what each group took, and all of them together."""
    say(f"{series} scraped series that rules read; milliseconds of an evaluation, median and worst:")
    for name, found in sorted(took.items(), key=lambda item: -statistics.median(item[1])):
        say(f"{statistics.median(found) * 1000:8.1f} {max(found) * 1000:8.1f}  {name} ({len(found)} times)")
    total, worst = (sum(pick(found) for found in took.values()) for pick in (statistics.median, max))
    say(f"{total * 1000:8.1f} {worst * 1000:8.1f}  all {len(took)} groups, were they evaluated one after the other")
    for seconds, name in slowest:
        say(f"slowest of the last evaluation: {seconds * 1000:.1f} ms {name}")


if __name__ == "__main__":
    main()
