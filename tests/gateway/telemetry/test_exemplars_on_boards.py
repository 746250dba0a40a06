"""Panels that ask for exemplars get the traces of requests, from a real Prometheus that scrapes a real gateway."""

import time
from pathlib import Path
from typing import Any

import yaml

from boards.backfilled_prometheus import needs_prometheus, running_prometheus
from boards.board_queries import BOARDS, board_named, filled_in, panels_of
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from processes.span_collector import SpanCollector
from stageline_gateway.settings import GatewaySettings

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CHOSEN = dict.fromkeys(("cluster", "namespace", "model_name", "asked_for"), ".*") | {"__rate_interval": "1m"}


def expressions_with_exemplars() -> dict[str, str]:
    """By board and panel, everything chosen."""
    return {
        f"{board}: {panel['title']}": filled_in(target["expr"], CHOSEN)
        for board in BOARDS
        for panel in panels_of(board_named(board))
        for target in panel.get("targets") or ()
        if target.get("exemplar")
    }


def scraping(gateway: RunningGateway) -> str:
    """Prometheus' configuration, with the labels that the chart's monitor sets."""
    place = {"targets": [gateway.admin.base_url.netloc.decode()], "labels": {"namespace": "team"}}
    scrape = {"job_name": "stageline-gateway", "scrape_interval": "1s", "static_configs": [place]}
    return yaml.safe_dump({"global": {}, "scrape_configs": [scrape]})


@needs_prometheus
def test_every_panel_that_asks_for_exemplars_gets_the_trace_of_a_request(
    tmp_path: Path, engine: ScriptedEngine, collector: SpanCollector
) -> None:
    expressions = expressions_with_exemplars()
    assert {title.partition(":")[0] for title in expressions} == {"fleet", "gateway"}
    begun = time.time()
    options = ("--enable-feature=exemplar-storage",)
    with running_gateway(GatewaySettings(tmp_path / "e.json", otlp_endpoint=collector.url)) as gateway:
        gateway.serve(group(engine.url))
        with running_prometheus(tmp_path / "data", scraping(gateway), *options) as prometheus:
            headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
            asked = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
            assert asked.is_success, asked.text

            def found() -> dict[str, list[dict[str, Any]]]:
                now = time.time()
                return {title: prometheus.exemplars(expr, begun, now + 60) for title, expr in expressions.items()}

            eventually(lambda: all(found().values()), lambda: str(found()))
            for title, series in found().items():
                traces = {one["labels"]["trace_id"] for each in series for one in each["exemplars"]}
                assert traces == {TRACE_ID}, title
                assert {each["seriesLabels"]["model_name"] for each in series} == {MODEL}, title
