"""One page of metrics from the reports of several workers."""

from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from stageline_api.telemetry.metric_spec import MetricKind
from stageline_gateway.telemetry import merging
from stageline_gateway.telemetry.metric_names import ALL_METRICS, GAUGES_OF_WORKERS, GROUPS
from stageline_gateway.telemetry.metrics import GatewayMetrics

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def report(metrics: GatewayMetrics) -> merging.Report:
    return merging.decoded(merging.encoded(merging.report_of(metrics.registry.collectors.collect())))


def samples(page: str) -> dict[Any, float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def worker(requests: int, ready: bool, gap_seconds: float) -> GatewayMetrics:
    metrics = GatewayMetrics()
    of_models = metrics.of("here")
    of_models.show_groups({"tiny": [True, ready]}, {"tiny": int(not ready)})
    of_models.of_model("tiny").in_flight.set(requests)
    for _ in range(requests):
        of_models.of_model("tiny").answered(200)
        of_models.token_gaps("tiny").observe(gap_seconds)
        of_models.tokens("tiny").value += 7
        of_models.of_model("tiny").time_to_first_token.observe(gap_seconds, {"trace_id": f"{requests:032x}"})
    return metrics


def test_the_page_of_one_worker_is_the_page_of_a_gateway_of_one() -> None:
    metrics = worker(3, ready=False, gap_seconds=0.02)
    for accept in ("", OPEN_METRICS):
        assert merging.exposition([report(metrics)], accept) == metrics.registry.exposition(accept)


def test_counters_and_histograms_are_summed_and_each_gauge_is_told_as_it_means() -> None:
    page, _ = merging.exposition([report(worker(3, False, 0.02)), report(worker(5, True, 0.5))], "")
    found = samples(page.decode())

    def of(name: str, **labels: str) -> float:
        return found[name, tuple(sorted({"namespace": "here", "model_name": "tiny", **labels}.items()))]

    assert of("stageline_gateway_requests_total", code="200") == 8
    assert of("stageline_generation_tokens_total") == 56
    assert of("stageline_inter_token_latency_seconds_count") == 8
    assert of("stageline_inter_token_latency_seconds_bucket", le="+Inf") == 8
    assert of("stageline_gateway_requests_in_flight") == 8
    assert (of(GROUPS.name, ready="true"), of(GROUPS.name, ready="false")) == (1, 1), "two groups, one not for all"
    assert of("stageline_gateway_circuits_open") == 1
    assert found["stageline_gateway_keys_stale", ()] == 0
    assert "stageline_gateway_tls_certificate_expiry_timestamp_seconds" not in {name for name, _ in found}


def test_exemplars_stay() -> None:
    page, content_type = merging.exposition(
        [report(worker(3, False, 0.02)), report(worker(5, True, 0.5))], OPEN_METRICS
    )
    assert "openmetrics" in content_type
    traces = {
        sample.exemplar.labels["trace_id"]
        for family in open_families(page.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar
    }
    assert traces == {f"{3:032x}", f"{5:032x}"}


def test_what_a_worker_had_counted_outlives_it_and_its_gauges_do_not() -> None:
    left = merging.counted(report(worker(3, False, 0.02)))
    successor = merging.report_of(merging.added([report(worker(1, True, 0.02)), left]))
    found = samples(merging.exposition([successor], "")[0].decode())
    model = (("model_name", "tiny"), ("namespace", "here"))
    assert found["stageline_gateway_requests_total", (("code", "200"), *model)] == 4
    assert found["stageline_gateway_requests_in_flight", model] == 1


def test_it_is_said_of_every_gauge_what_stands_for_all_workers() -> None:
    gauges = {spec.name for spec in ALL_METRICS if spec.kind is MetricKind.GAUGE}
    assert gauges == {*GAUGES_OF_WORKERS, GROUPS.name}
