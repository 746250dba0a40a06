"""A game day: break a real model, and see whether the right alert says so in time, and no other beside it.

`make game-day` breaks a model that `stageline up --monitor` serves, a new one for each scenario, and then a cluster
with the chart, operator, gateway and model in it, and writes the results to docs/dev/game-day.md. It fails when an
alert does not fire within its time, names something else, or others fire that are not of the matter. Takes some minutes
per scenario and both cores; no test runs it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from boards.cluster_game_day_scenarios import CLUSTER_SCENARIOS
from boards.game_day_page import page
from boards.game_day_scenarios import SCENARIOS, Broken, Scenario
from boards.watched_cluster import watched_cluster
from processes.free_ports import free_port
from processes.serving_command import ServingCommand, serving
from stageline_local.monitoring.options import MonitorOptions
from stageline_local.monitoring.scrape import seconds_of
from stageline_local.session.instance import default_cache_dir

ROOT: Final = Path(__file__).resolve().parents[3]
SLACK_SECONDS: Final = 90.0
"""For a busy machine, a scrape, an evaluation."""


def say(line: str) -> None:
    """To whoever looks on."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(slots=True)
class Report:
    """What one scenario came to. Times are in seconds since what was done was done."""

    scenario: Scenario[Any]
    began: datetime
    alert_speed: float
    hold_seconds: float
    lines: list[tuple[datetime, str]] = field(default_factory=list)
    pending_after_seconds: float | None = None
    fired_after_seconds: float | None = None
    fired: dict[str, Any] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @property
    def allowed_seconds(self) -> float:
        """What the alert's expression looks back over, how long it must hold, and some slack."""
        return self.scenario.window_seconds + self.hold_seconds / self.alert_speed + SLACK_SECONDS

    @property
    def names_it(self) -> bool:
        """Whether it fired and names what was broken."""
        if not self.fired:
            return False
        says = self.fired["annotations"]["description"]
        return self.scenario.labels.items() <= self.fired["labels"].items() and self.scenario.says in says

    @property
    def misleading(self) -> list[str]:
        """Alerts that fired beside it though what was broken is not their matter."""
        return sorted({*self.others} - self.scenario.beside)

    @property
    def is_right(self) -> bool:
        return self.names_it and not self.misleading

    def note(self, text: str) -> None:
        """Add a dated line, and say it."""
        self.lines.append((datetime.now(UTC), text))
        say(f"{datetime.now(UTC):%H:%M:%S} {text}")


def hold_seconds_of(alert: str) -> float:
    """The `for` of a shipped alert."""
    for path in MonitorOptions.with_shipped(1, 1.0).rules:
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                if rule.get("alert") == alert:
                    return seconds_of(rule.get("for", "0"))
    raise SystemExit(f"no shipped rule is called {alert}")


def play(scenario: Scenario[Broken], broken: Broken, prometheus: str, alert_speed: float) -> Report:
    """One scenario on what it may break; `prometheus` is the base URL of the API that tells of alerts."""
    report = Report(scenario, datetime.now(UTC), alert_speed, hold_seconds_of(scenario.alert))
    say(f"== {scenario.title}: {scenario.alert}, within {report.allowed_seconds:.0f} s")
    acting = scenario.act(broken, report.note)
    next(acting)
    try:
        _watch(report, prometheus)
    finally:
        next(acting, None)
    return report


def play_local(names: Collection[str], alert_speed: float) -> Iterator[Report]:
    """The scenarios of these names that break `stageline up`, each on a model of its own."""
    for scenario in SCENARIOS:
        if scenario.name in names:
            with (
                tempfile.TemporaryDirectory(prefix="game-day-") as directory,
                _model_up(scenario, alert_speed, Path(directory)) as (up, prometheus),
            ):
                report = play(scenario, up, prometheus, alert_speed)
            yield report


def play_in_cluster(names: Collection[str], alert_speed: float) -> Iterator[Report]:
    """The scenarios of these names that break a cluster, all on one."""
    chosen = [scenario for scenario in CLUSTER_SCENARIOS if scenario.name in names]
    if not chosen:
        return
    with (
        tempfile.TemporaryDirectory(prefix="game-day-") as directory,
        watched_cluster(Path(directory), default_cache_dir(), alert_speed) as broken,
    ):
        for scenario in chosen:
            yield play(scenario, broken, broken.prometheus, alert_speed)


@contextmanager
def _model_up(
    scenario: Scenario[ServingCommand], alert_speed: float, directory: Path
) -> Iterator[tuple[ServingCommand, str]]:
    document = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text(encoding="utf-8"))
    document["spec"] |= {"engine": scenario.engine, "restart": {"backoffSeconds": 1}}
    manifest = directory / "smollm2.yaml"
    manifest.write_text(yaml.safe_dump(document), encoding="utf-8")
    port = free_port(in_a_row=2)  # the page's and Prometheus'
    options = ("--monitor", "--monitor-port", str(port), "--alert-speed", str(alert_speed))
    with serving(manifest, directory / "up", default_cache_dir(), *options) as up:
        up.wait_for("Boards and alerts:")
        yield up, f"http://127.0.0.1:{port}/prometheus/api/v1"


def _watch(report: Report, prometheus: str) -> None:
    """Look once a second until the alert fires or its time is over."""
    done = time.monotonic()
    with httpx.Client(trust_env=False, timeout=30.0) as client:
        while (passed := time.monotonic() - done) < report.allowed_seconds:
            alerts = _alerts(client, prometheus)
            firing = [each for each in alerts if each["state"] == "firing"]
            own = [each for each in alerts if each["labels"]["alertname"] == report.scenario.alert]
            report.others = sorted(
                {each["labels"]["alertname"] for each in firing} - {report.scenario.alert} | {*report.others}
            )
            if own and report.pending_after_seconds is None:
                report.pending_after_seconds = passed
            if own and own[0] in firing:
                report.fired_after_seconds, report.fired = passed, own[0]
                report.note(f"{report.scenario.alert} fires, {passed:.0f} s later")
                return
            time.sleep(1.0)
    report.note(f"{report.scenario.alert} did not fire within {report.allowed_seconds:.0f} s")


def _alerts(client: httpx.Client, prometheus: str) -> list[dict[str, Any]]:
    """What fires or is pending; nothing while a busy machine keeps Prometheus from answering."""
    try:
        return list(client.get(f"{prometheus}/alerts").raise_for_status().json()["data"]["alerts"])
    except httpx.HTTPError:
        return []


def main() -> int:
    """Returns 1 when any alert was late, missing or wrong."""
    names = [*(each.name for each in SCENARIOS), *(each.name for each in CLUSTER_SCENARIOS)]
    parser = argparse.ArgumentParser(prog="make game-day", description=__doc__)
    parser.add_argument(
        "--alert-speed", type=float, default=1.0, help="divide every alert's `for` by this; 1 is real time"
    )
    parser.add_argument("--only", choices=names, action="append", help="a scenario to play; all if left out")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "dev" / "game-day.md", help="where the log goes")
    given = parser.parse_args()
    chosen, speed = given.only or names, given.alert_speed
    reports: list[Report] = []
    for report in chain(play_local(chosen, speed), play_in_cluster(chosen, speed)):
        reports.append(report)
        given.page.write_text(page(reports), encoding="utf-8")
    return 0 if all(report.is_right for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
