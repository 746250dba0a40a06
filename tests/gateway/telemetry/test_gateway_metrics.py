"""The numbers on /metrics are the numbers of the requests that were made."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from processes.gateway_harness import IN_FLIGHT, MODEL, RunningGateway
from processes.scripted_engine import Hold, Pause, Say, ScriptedEngine, answer
from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason
from stageline_gateway.telemetry.metrics import GatewayMetrics, RequestMeter

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}
NAMESPACE = "here"


def value(registry: CollectorRegistry, name: str) -> float | None:
    """One sample of the model's."""
    return registry.get_sample_value(name, {"namespace": NAMESPACE, "model_name": MODEL})


def test_the_meter_computes_each_latency_from_its_definition() -> None:
    times = iter([1.25, 1.5, 2.0, 4.0, 4.25])
    metrics = GatewayMetrics()
    meter = RequestMeter(metrics.of(NAMESPACE), MODEL, clock=lambda: next(times), arrived=1.0)
    meter.see(Admitted(prompt_tokens=7))
    meter.see(Delta(text="", token_ids=()))
    meter.see(Delta(text="a", token_ids=(1,)))
    meter.see(Delta(text="b", token_ids=(2, 3)))
    meter.see(Delta(text="c", token_ids=(4,)))
    meter.see(Finished(reason=FinishReason.STOP, prompt_tokens=7, completion_tokens=4))
    registry = metrics.registry.collectors
    assert value(registry, "stageline_gateway_queue_time_seconds_sum") == 0.25
    assert value(registry, "stageline_time_to_first_token_seconds_sum") == 0.5
    assert value(registry, "stageline_inter_token_latency_seconds_count") == 2, "three messages, two gaps"
    assert value(registry, "stageline_inter_token_latency_seconds_sum") == 2.5
    assert value(registry, "stageline_request_time_per_output_token_seconds_sum") == pytest.approx(2.5 / 3)
    assert value(registry, "stageline_e2e_request_latency_seconds_sum") == 3.25
    assert value(registry, "stageline_prompt_tokens_total") == 7
    assert value(registry, "stageline_generation_tokens_total") == 4


def test_a_request_is_given_up_by_who_leaves_before_its_first_token() -> None:
    metrics = GatewayMetrics()
    for tokens in ((), (1,)):
        meter = RequestMeter(metrics.of(NAMESPACE), MODEL, clock=lambda: 4.5, arrived=1.0)
        meter.see(Admitted(prompt_tokens=1))
        meter.see(Delta(text="a", token_ids=tokens))
        meter.client_left()
    assert value(metrics.registry.collectors, "stageline_gateway_abandoned_after_seconds_count") == 1
    assert value(metrics.registry.collectors, "stageline_gateway_abandoned_after_seconds_sum") == 3.5


def test_one_token_has_no_time_per_output_token() -> None:
    metrics = GatewayMetrics()
    meter = RequestMeter(metrics.of(NAMESPACE), MODEL)
    meter.see(Admitted(prompt_tokens=1))
    meter.see(Delta(text="a", token_ids=(1,)))
    meter.see(Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1))
    assert value(metrics.registry.collectors, "stageline_request_time_per_output_token_seconds_count") is None
    assert value(metrics.registry.collectors, "stageline_e2e_request_latency_seconds_count") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_shows_on_the_page(gateway: RunningGateway, engine: ScriptedEngine, stream: bool) -> None:
    admitted, one, two, three, end = answer("a", "b", "c", prompt_tokens=5)
    # What comes together is one piece, so each has its time: enough for a gateway that others starve.
    engine.script = lambda _: [admitted, Pause(0.3), one, Pause(0.3), two, Pause(0.3), three, end]
    assert gateway.http.post("/v1/completions", json=BODY | {"stream": stream}).status_code == 200
    gateway.settle()
    assert gateway.sample("stageline_prompt_tokens_total", model_name=MODEL) == 5
    assert gateway.sample("stageline_generation_tokens_total", model_name=MODEL) == 3
    assert gateway.sample("stageline_inter_token_latency_seconds_count", model_name=MODEL) == 2
    # A lower bound alone: the pause lies between arrival and the first token.
    assert gateway.sample("stageline_time_to_first_token_seconds_sum", model_name=MODEL) >= 0.3
    assert gateway.sample("stageline_gateway_requests_total", model_name=MODEL, code="200") == 1
    assert gateway.sample("stageline_gateway_groups", model_name=MODEL, ready="true") == 1


def test_requests_in_flight_are_counted(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Hold(), *answer("a")[1:]]
    with gateway.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as streaming:
        assert gateway.sample(IN_FLIGHT, model_name=MODEL) == 1
        engine.release()
        streaming.read()
    gateway.settle()


def test_made_up_models_make_no_series(gateway: RunningGateway) -> None:
    for index in range(20):
        assert gateway.http.post("/v1/completions", json=BODY | {"model": f"m{index}"}).status_code == 404
    names = {dict(labels).get("model_name") for _, labels in gateway.samples()}
    assert names <= {None, "", MODEL}, names
    assert gateway.sample("stageline_gateway_requests_total", model_name="", code="404") == 20
