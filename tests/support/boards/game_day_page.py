"""The page of a game day: what was done to a model, when, and which alert said so. Only its text is made here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from boards.game_day import Report

_HEAD: Final = """# Game day

Each part is SmolLM2 as two stages, broken on purpose and watched through a Prometheus with the shipped rules: first as
`stageline up --monitor` serves it ([what is done](../tests/support/boards/game_day_scenarios.py)), then in a
[cluster](../tests/support/boards/watched_cluster.py) of a real control plane with the chart, on nodes that run pods as
processes of one machine ([what is done](../tests/support/boards/cluster_game_day_scenarios.py)). Written by
`make game-day` ([game_day.py](../tests/support/boards/game_day.py)), which fails when an alert doesn't fire within its
time, names something else, or another fires whose matter it is not. Its time is how far the alert's expression looks
back, plus its `for`, plus a minute and a half for a busy machine. Times are UTC; what each alert means stands in [its
runbook](runbooks/).
"""


def page(reports: "Sequence[Report]") -> str:
    """The whole page."""
    rows = [_row(report) for report in reports]
    table = "\n".join(
        ["| What was done | Alert | `for` | Fired after | Allowed |", "| --- | --- | --- | --- | --- |", *rows]
    )
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
        parts += [
            f"Its condition was true for the first time {report.pending_after_seconds:.0f} s after what was done."
        ]
    if labels:
        parts += [f"It named {shown} and said:", "", f"> {report.fired['annotations']['description']}"]
    if report.others:
        parts += ["", f"Also fired meanwhile: {', '.join(f'`{name}`' for name in report.others)}."]
    return "\n".join([*parts, ""])
