"""What the page makes of a board: values with their units, names, thresholds and links, in a real browser.

The expressions are constants, so that what must stand in a panel is known; Prometheus is real.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from boards.backfilled_prometheus import needs_prometheus, running_prometheus
from boards.browser import HOW_TO_GET, Browser, browser, is_installed
from processes.free_ports import free_port
from stageline_local.monitoring.board_server import BoardServer
from stageline_local.monitoring.options import find_plotly

pytestmark = [pytest.mark.skipif(not is_installed(), reason=HOW_TO_GET), needs_prometheus]


def labelled(value: str, **labels: str) -> str:
    expression = f"vector({value})"
    for name, text in labels.items():
        expression = f'label_replace({expression}, "{name}", "{text}", "", "")'
    return expression


OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "auto"},
    "timeseries": {"legend": {"displayMode": "table", "calcs": ["lastNotNull", "max"]}},
    "barchart": {"xField": "stage", "legend": {"displayMode": "list", "calcs": []}},
    "heatmap": {"color": {"scheme": "RdYlBu", "reverse": True, "min": 0, "max": 2}, "cellValues": {"unit": "none"}},
}
"""As Grafana's SDK writes them."""


def panel(kind: str, *expressions: str, unit: str = "none", legend: str = "", **more: Any) -> dict[str, Any]:
    instant = {"instant": True, "format": "table"} if kind in ("table", "barchart") else {}
    instant |= {"instant": True} if more.pop("instant", False) else {}
    targets = [
        {"refId": "ABC"[at], "expr": each, "legendFormat": legend, **instant} for at, each in enumerate(expressions)
    ]
    defaults = {"unit": unit, **more.pop("defaults", {})}
    field = {"defaults": defaults, "overrides": more.pop("overrides", [])}
    fixed = {"type": kind, "title": kind, "targets": targets, "fieldConfig": field, "options": OPTIONS.get(kind, {})}
    return fixed | more


NUMBERED = """
scrape_configs:
  - {job_name: nobody, scrape_interval: 1s, scrape_timeout: 1s,
     static_configs: [{targets: ["127.0.0.1:1"], labels: {number: "90"}}]}
"""
"""A target that nobody answers for has a series `up` all the same, by whose label a number can be chosen."""
THRESHOLDS = {"mode": "absolute", "steps": [{"color": "green", "value": None}, {"color": "#c00000", "value": 0.2}]}
OVER = " or ".join(labelled(str(stage + 1), over="$__rate_interval", stage=str(stage)) for stage in (0, 1))
"""Named by what a rate is over."""
PANELS = {
    "share": panel("stat", "vector(0.25)", unit="percentunit", defaults={"thresholds": THRESHOLDS}),
    "two": panel("stat", labelled("1", stage="0") + " or " + labelled("2", stage="1"), legend="stage {{stage}}"),
    "nothing": panel("stat", "vector(1) > 2", defaults={"noValue": "No data"}),
    "mapped": panel(
        "stat", "vector(1)", defaults={"mappings": [{"type": "value", "options": {"1": {"text": "up"}}}]}
    ),
    "chosen": panel("stat", 'vector($number)', unit="s"),
    "recent": panel("stat", OVER, legend="{{over}} {{stage}}", instant=True),
    "course": panel("stat", OVER, legend="{{over}} {{stage}}"),
    "counted": panel("stat", "vector(2.6)", defaults={"decimals": 0}),
    "table": panel(
        "table", labelled("1536", pod="a"), labelled("0.5", pod="a"),
        transformations=[
            {"id": "merge"},
            {"id": "organize", "options": {"renameByName": {"pod": "Pod", "Value #A": "Memory", "Value #B": "Share"}}},
        ],
        overrides=[
            {"matcher": {"id": "byName", "options": "Memory"}, "properties": [{"id": "unit", "value": "bytes"}]},
            {"matcher": {"id": "byName", "options": "Pod"}, "properties": [
                {"id": "links", "value": [{"title": "", "url": "/d/other?var-pod=${__data.fields.Pod}"}]}]},
        ],
    ),
    "lines": panel("timeseries", "vector(0.002)", unit="s", legend="half"),
    "whole": panel("timeseries", "vector(1)", legend="one", defaults={"decimals": 0, "min": 0}),
    "stacks": panel("barchart", labelled("3", stage="0")),
    "states": panel("state-timeline", labelled("1", pod="a"), legend="{{pod}}"),
    "rows": panel("heatmap", labelled("1", pod="a"), legend="{{pod}}"),
    "strange": panel("geomap", "vector(1)"),
    "deep": panel("stat", "vector(1)", unit="fathoms"),
    "wrong": panel("stat", "sum(("),
}  # fmt: skip


@contextmanager
def served(directory: Path, prometheus_url: str) -> Iterator[str]:
    """The page with a board of all `PANELS`; yields its URL."""
    panels = [
        {**each, "title": name, "gridPos": {"x": 6 * (at % 4), "y": 6 * (at // 4), "w": 6, "h": 6}}
        for at, (name, each) in enumerate(PANELS.items())
    ]
    number = {"name": "number", "type": "query", "query": {"query": "label_values(up, number)"}}
    board = {"title": "Constants", "uid": "constants", "panels": panels, "templating": {"list": [number]}}
    (directory / "constants.json").write_text(json.dumps(board))
    facts = {"model": "tiny", "scrape_interval_seconds": 2, "alert_speed": 1, "prometheus": prometheus_url}
    loop = asyncio.new_event_loop()
    server = BoardServer(
        (directory / "constants.json",), find_plotly(), prometheus_url, facts, lambda _: (b"", "text/plain")
    )
    port = free_port()
    loop.run_until_complete(server.start(port))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    directory = tmp_path_factory.mktemp("page")
    (directory / "data").mkdir()
    with (
        running_prometheus(directory / "data", NUMBERED) as prometheus,
        served(directory, str(prometheus.http.base_url)) as url,
        browser(directory, 1400, 1000) as window,
    ):
        deadline = time.monotonic() + 90
        while not prometheus.at("up", time.time()):
            assert time.monotonic() < deadline, "Prometheus has scraped nothing"
            time.sleep(0.1)
        window.open(f"{url}/?range=120")
        window.until(lambda: window.run("return document.body.dataset.state") == "drawn", "not drawn")
        yield window


def box(name: str) -> str:
    return f'.panel[data-title="{name}"]'


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("share", "25%"),
        ("two", "stage 0\n1\nstage 1\n2"),
        ("nothing", "No data"),
        ("mapped", "up"),
        ("chosen", "1.5 min"),
        ("counted", "3"),
        ("recent", "60s 0\n1\n60s 1\n2"),
        ("course", "8s 0\n1\n8s 1\n2"),
        ("table", "Pod Share Memory\na 0.5 1.5 KiB"),
    ],
)
def test_a_value_is_shown_as_the_board_says(window: Browser, name: str, expected: str) -> None:
    assert sorted(window.text(f"{box(name)} .body").split()) == sorted(expected.split())


def test_thresholds_colour_a_value(window: Browser) -> None:
    script = "return getComputedStyle(document.querySelector(arguments[0])).color"
    assert window.run(script, f"{box('share')} .stat") == "rgb(192, 0, 0)"


def test_an_axis_of_what_is_counted_has_whole_numbers(window: Browser) -> None:
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
    window.until(lambda: window.run(script, f"{box('whole')} .ytick text"), "no axis")
    assert window.run(script, f"{box('whole')} .ytick text") == ["0", "1"]
    assert len(window.run(script, f"{box('lines')} .ytick text")) > 2


def test_links_lead_to_other_boards_on_this_page(window: Browser) -> None:
    script = "return document.querySelector(arguments[0]).getAttribute('href')"
    assert window.run(script, f"{box('table')} td a") == "?board=other&var-pod=a"


@pytest.mark.parametrize(("name", "shape"), [("lines", "path.js-line, path.point"), ("stacks", "g.point path")])
def test_plots_draw_what_they_were_asked_for(window: Browser, name: str, shape: str) -> None:
    script = "return document.querySelectorAll(arguments[0]).length"
    window.until(lambda: window.run(script, ", ".join(f"{box(name)} {each}" for each in shape.split(", "))) > 0, name)


def test_a_legend_says_what_a_course_came_to(window: Browser) -> None:
    assert window.text(f"{box('lines')} .legend").split() == ["Name", "Last", "Max", "half", "2", "ms", "2", "ms"]


def test_what_the_page_can_not_draw_says_so_where_it_stands(window: Browser) -> None:
    assert "can't draw panels of type geomap" in window.text(f"{box('strange')} .message")
    assert "parse error" in window.text(f"{box('wrong')} .message")
    assert "does not know the unit fathoms" in window.text(f"{box('deep')} .message")
    script = "return [...document.querySelectorAll('.panel[data-state=error]')].map((each) => each.dataset.title)"
    assert window.run(script) == ["strange", "deep", "wrong"]


def test_a_prometheus_that_is_gone_is_said(tmp_path: Path) -> None:
    with served(tmp_path, f"http://127.0.0.1:{free_port()}") as url, browser(tmp_path, 900, 700) as window:
        window.open(url)
        window.until(lambda: "Prometheus does not answer" in window.text("#notice"), "no notice")
        assert window.run("return document.body.dataset.state") == "stale"
