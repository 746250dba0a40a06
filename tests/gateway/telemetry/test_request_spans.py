"""Spans of requests, as a collector gets them: in the client's trace, with codes and counts, without text."""

import json
import sys
from pathlib import Path

import pytest

from processes.gateway_harness import MODEL, group, running_gateway
from processes.scripted_engine import Drop, ScriptedEngine, answer
from processes.span_collector import SpanCollector
from stageline_api.errors import UserError
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.telemetry.tracing import TraceContext, open_tracing

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def test_spans_continue_the_clients_trace(tmp_path: Path, engine: ScriptedEngine, collector: SpanCollector) -> None:
    with running_gateway(GatewaySettings(tmp_path / "e.json", otlp_endpoint=collector.url)) as gateway:
        gateway.serve(group(engine.url))
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "congo=t61rcWkgMzE"}
        answered = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "heron"}, headers=headers)
        gateway.http.post("/v1/chat/completions", json={"model": "heron"})
    collector.wait_for(3)
    spans = collector.spans()
    mine = spans.pop(TRACE_ID)
    assert (mine["name"], mine["parent"]) == ("POST /v1/completions", PARENT_ID)
    (run,) = collector.runs(TRACE_ID)
    assert (run.parent, run.is_error, run.attributes["stageline.run"]) == (mine["span"], False, 1)
    assert engine.requests[0].traceparent == f"00-{TRACE_ID}-{run.span}-01", "the engine's parent is its run"
    assert engine.requests[0].tracestate == "congo=t61rcWkgMzE"
    assert mine["http.response.status_code"] == "200"
    assert mine["stageline.request_id"] == answered.json()["id"]
    assert (mine["stageline.model"], mine["stageline.tokens"]) == (MODEL, "2")
    [refused] = spans.values()
    assert (refused["parent"], refused["http.response.status_code"]) == ("", "400")
    assert b"heron" not in b"".join(collector.bodies)


def test_who_has_no_key_fills_no_collector(tmp_path: Path, engine: ScriptedEngine, collector: SpanCollector) -> None:
    keys = tmp_path / "keys.json"
    secret = "sk-0123456789abcdef"
    keys.write_text(json.dumps({"keys": [{"name": "heron", "key": secret}]}))
    settings = GatewaySettings(tmp_path / "e.json", keys_path=keys, otlp_endpoint=collector.url)
    with running_gateway(settings) as gateway:
        known = {"authorization": f"Bearer {secret}", "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        gateway.http.headers["authorization"] = known["authorization"]
        gateway.serve(group(engine.url))
        del gateway.http.headers["authorization"]
        headers = {"traceparent": f"00-{'a' * 32}-{PARENT_ID}-01"}
        for path in ("/v1/completions", "/detokenize"):
            refused = gateway.http.post(path, json={"model": MODEL, "prompt": "x", "tokens": [5]}, headers=headers)
            assert refused.status_code == 401, refused.text
        assert gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=known).is_success
    collector.wait_for(2)
    assert {span.trace for span in collector.all_spans()} == {TRACE_ID}, collector.all_spans()


def test_a_span_counts_the_tokens_of_all_choices_and_tokenizing_has_one_too(
    tmp_path: Path, engine: ScriptedEngine, collector: SpanCollector
) -> None:
    engine.replies["POST /v1/detokenize"] = (200, '{"text": "ab"}')
    with running_gateway(GatewaySettings(tmp_path / "e.json", otlp_endpoint=collector.url)) as gateway:
        gateway.serve(group(engine.url))
        gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": 3})
        gateway.http.post("/detokenize", json={"model": MODEL, "tokens": [5]})
        gateway.http.post("/detokenize", json={"model": "absent", "tokens": [5]})
    collector.wait_for(6)
    spans = sorted(collector.spans().values(), key=lambda span: (span["name"], span["http.response.status_code"]))
    codes = [(span["name"], span["http.response.status_code"]) for span in spans]
    assert codes == [("POST /detokenize", "200"), ("POST /detokenize", "404"), ("POST /v1/completions", "200")]
    assert spans[-1]["stageline.tokens"] == "6", "three choices of two tokens"
    assert engine.asked_with[0]["traceparent"].split("-")[2] == spans[0]["span"]


def test_each_run_has_a_span_and_a_lost_one_says_how_it_was_lost(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine, collector: SpanCollector
) -> None:
    first, second = answer("a", "b")[:2], answer("a", "b")
    engine.script = other_engine.script = lambda asked: second if asked.generated_token_ids else [*first, Drop()]
    with running_gateway(GatewaySettings(tmp_path / "e.json", otlp_endpoint=collector.url)) as gateway:
        gateway.serve(group(engine.url), group(other_engine.url, 1))
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        answered = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
        assert answered.status_code == 200, answered.text
    collector.wait_for(3)
    lost, went_on = collector.runs(TRACE_ID)
    assert (lost.is_error, lost.attributes["error.type"]) == (True, "connection_lost")
    assert (went_on.is_error, went_on.attributes["stageline.resumed_tokens"]) == (False, 1)
    assert {lost.attributes["stageline.group"], went_on.attributes["stageline.group"]} == {0, 1}
    told = {one.traceparent for one in (*engine.requests, *other_engine.requests)}
    assert told == {f"00-{TRACE_ID}-{run.span}-01" for run in (lost, went_on)}


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_standard_variables_name_a_collector_too(
    tmp_path: Path,
    engine: ScriptedEngine,
    collector: SpanCollector,
    protocol: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with running_gateway(GatewaySettings(tmp_path / "e.json")) as gateway:
        gateway.serve(group(engine.url))
        assert gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).is_success
    num_spans = 2 * (protocol != "grpc")
    collector.wait_for(num_spans)
    assert [span.service for span in collector.all_spans()] == ["stageline-gateway"] * num_spans
    assert ("OTEL_EXPORTER_OTLP_PROTOCOL='grpc' can't be used" in caplog.text) == (protocol == "grpc")


def test_asking_for_spans_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match=r"stageline\[tracing\]"):
        open_tracing("http://127.0.0.1:4318")


def test_nothing_of_it_is_loaded_unasked() -> None:
    assert open_tracing(None).begin("/", TraceContext("given", "a=b")).trace == TraceContext("given", "a=b")
