"""A pytest plugin that ends a run with one line on what was skipped because a program is not installed.

Without that line a run on a machine without Prometheus or a browser looks as complete as one with both. Skips for any
other reason (a CUDA device is there, a cluster is not our own) are not counted.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

import pytest

# What the reason of a skip names, and how the program is installed. The first that matches counts.
HOW_TO_GET: Final = (
    ("Prometheus", re.compile(r"prometheus|promtool", re.IGNORECASE), "sh scripts/install-prometheus"),
    ("a browser", re.compile(r"chromedriver|chromium|browser", re.IGNORECASE), "sh scripts/install-browser"),
    ("a C compiler", re.compile(r"compiler", re.IGNORECASE), "apt-get install gcc"),
    ("curl", re.compile(r"\bcurl\b", re.IGNORECASE), "apt-get install curl"),
)


def skipped_line(reasons: Iterable[str]) -> str:
    """`skipped for want of Prometheus: 12 tests (sh scripts/install-prometheus)`; empty when nothing was."""
    counts: dict[int, int] = {}
    for reason in reasons:
        number = next((number for number, (_, names, _) in enumerate(HOW_TO_GET) if names.search(reason)), None)
        if number is not None:
            counts[number] = counts.get(number, 0) + 1
    parts = []
    for number, count in sorted(counts.items()):
        program, _, command = HOW_TO_GET[number]
        parts.append(f"{program}: {count} test{'s' if count > 1 else ''} ({command})")
    return f"skipped for want of {'; '.join(parts)}" if parts else ""


def skip_reasons(reports: Sequence[pytest.TestReport]) -> list[str]:
    """Why each test was skipped; reports of workers come with the same text as those of one process."""
    return [str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple)]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print after pytest's own last line, so that it is the last one of `make test`."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    line = skipped_line(skip_reasons(reporter.stats.get("skipped", [])))
    if line:
        reporter.write_line(line, yellow=True)
