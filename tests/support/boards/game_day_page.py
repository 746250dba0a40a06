"""The page of a game day: each fault, its time, and the alert that it fired. Only its text is made here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from boards.game_day import Report

_HEAD: Final = """# Game day

`make game-day` ([game_day.py](../../tests/support/boards/game_day.py)) writes this page: faults, and the alerts they
fire. It takes an hour and needs Go. SmolLM2 runs in two stages, first under `stageline up --monitor`
([scenarios](../../tests/support/boards/game_day_scenarios.py)), then with the chart in a
[test cluster](../../tests/support/boards/watched_cluster.py)
([scenarios](../../tests/support/boards/cluster_game_day_scenarios.py)). It fails if an alert does not fire in time, has
the wrong labels, or an unrelated alert fires. The time allowed is the window of the alert's expression, plus its `for`,
plus 90 s. Times are UTC. Each alert has a [runbook](../runbooks/README.md).
"""


def page(reports: "Sequence[Report]") -> str:
    """The whole page."""
    rows = [_row(report) for report in reports]
    table = "\n".join(["| Fault | Alert | `for` | Fired after | Allowed |", "| --- | --- | --- | --- | --- |", *rows])
    return "\n".join([_HEAD, table, "", *(_part(report) for report in reports)])


def _row(report: "Report") -> str:
    fired = "**never**" if report.fired_after_seconds is None else f"{report.fired_after_seconds:.0f} s"
    wrong = "" if report.names_it or report.fired_after_seconds is None else ", **wrong labels**"
    if report.misleading:
        wrong += f", **beside it {', '.join(report.misleading)}**"
    cells = [
        report.scenario.title,
        f"`{report.scenario.alert}`",
        _hold(report),
        fired + wrong,
        f"{report.allowed_seconds:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def _hold(report: "Report") -> str:
    if report.hold_seconds == 0:
        return "none"
    if report.alert_speed == 1:
        return f"{report.hold_seconds:.0f} s"
    shortened = report.hold_seconds / report.alert_speed
    return f"{shortened:.0f} s (drill: 1/{report.alert_speed:g} of {report.hold_seconds:.0f} s)"


def _part(report: "Report") -> str:
    lines = [f"- {moment:%H:%M:%S} {text}" for moment, text in report.lines]
    labels = report.fired.get("labels", {})
    shown = ", ".join(f"`{name}={value}`" for name, value in sorted(labels.items()))
    parts = [f"## {report.scenario.title}", "", f"{report.began:%Y-%m-%d %H:%M} UTC.", "", *lines, ""]
    if report.pending_after_seconds is not None:
        parts += [f"The alert's condition became true {report.pending_after_seconds:.0f} s after the fault."]
    if labels:
        parts += [f"Labels: {shown}. Description:", "", f"> {report.fired['annotations']['description']}"]
    if report.others:
        parts += ["", f"Also fired: {', '.join(f'`{name}`' for name in report.others)}."]
    return "\n".join([*parts, ""])
