"""Where spans are sent, the buckets of TTFT and of whole answers lead to the trace of a request that fell into them."""

from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar

from boards.exported_names import OPEN_METRICS
from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from processes.span_collector import SpanCollector
from stageline_gateway.settings import GatewaySettings

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7"
WITH_EXEMPLARS = ["stageline_time_to_first_token_seconds", "stageline_e2e_request_latency_seconds"]


def exemplars(gateway: RunningGateway) -> dict[str, list[Exemplar]]:
    """By family, as a scraper that asks for OpenMetrics gets them."""
    answer = gateway.admin.get("/metrics", headers=OPEN_METRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    return {
        family.name: [sample.exemplar for sample in family.samples if sample.exemplar is not None]
        for family in openmetrics_families(answer.text)  # type: ignore[no-untyped-call]
    }


def ask(gateway: RunningGateway, flags: str = "01") -> None:
    headers = {"traceparent": f"{PARENT}-{flags}"}
    assert gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers).is_success


def test_a_traced_request_is_the_exemplar_of_its_buckets(
    tmp_path: Path, engine: ScriptedEngine, collector: SpanCollector
) -> None:
    with running_gateway(GatewaySettings(tmp_path / "e.json", otlp_endpoint=collector.url)) as gateway:
        gateway.serve(group(engine.url))
        ask(gateway)
        found = exemplars(gateway)
        plain = gateway.admin.get("/metrics")
    collector.wait_for(2)
    assert TRACE_ID in collector.spans(), "the trace that the exemplar leads to"
    for name in WITH_EXEMPLARS:
        (exemplar,) = found.pop(name)
        assert exemplar.labels == {"trace_id": TRACE_ID}
        assert exemplar.value > 0
    assert not any(found.values())
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4"), "who doesn't ask gets plain text"
    assert TRACE_ID not in plain.text
    assert {one.name for one in text_string_to_metric_families(plain.text)} == {*found, *WITH_EXEMPLARS}


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_trace_that_is_not_kept_here_is_nobodys_exemplar(gateway: RunningGateway, flags: str) -> None:
    ask(gateway, flags)
    assert not any(exemplars(gateway).values())


def test_a_client_that_keeps_no_trace_leaves_none(
    tmp_path: Path, engine: ScriptedEngine, collector: SpanCollector
) -> None:
    with running_gateway(GatewaySettings(tmp_path / "e.json", otlp_endpoint=collector.url)) as gateway:
        gateway.serve(group(engine.url))
        ask(gateway, "00")
        assert not any(exemplars(gateway).values())
