"""The operator's /metrics: every name in the one module is really exposed, and well formed."""

import asyncio
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stageline_api.resource import pipeline_model
from stageline_api.telemetry.metric_spec import MetricSpec
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.controller.telemetry.http_endpoints import HttpEndpoints
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.telemetry.model_gauges import gauges_of
from stageline_operator.controller.telemetry.startup import Cache, Startup, StartupPhase
from stageline_operator.controller.telemetry.transitions import Transition
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import recorded_status

NOW = datetime.now(UTC)
"""When this file was read, which may be many minutes before its tests run; no age below may cross a limit by then."""
MODEL: dict[str, Any] = {
    "metadata": {"name": "m", "namespace": "ns", "uid": "u", "resourceVersion": "1", "generation": 4},
    "spec": {"model": {"servedName": "served"}, "replicas": 2, "restart": {"maxRestarts": 3, "windowSeconds": 36_000}},
    "status": {
        "observedGeneration": 3,
        "readyReplicas": 1,
        "conditions": [
            {
                "type": "Degraded",
                "status": "True",
                "reason": "RestartBudgetSpent",
                "lastTransitionTime": NOW.isoformat(),
            }
        ],
        "lastFailures": [
            {
                "time": (NOW - timedelta(seconds=age)).isoformat(),
                "group": 1,
                "incarnation": 3,
                "stage": stage,
                "failureClass": failure_class,
            }
            for age, stage, failure_class in ((10, 1, "OOMKilled"), (300, 0, "NodeLost"))
        ],
        "groups": [
            {"index": 0, "incarnation": 1, "phase": "Ready", "stages": [{"index": 0, "ready": True}]},
            {
                "index": 1,
                "incarnation": 4,
                "phase": "Failed",
                "restarts": [(NOW - timedelta(seconds=age)).isoformat() for age in (90_000, 300, 10)],
                "stages": [{"index": 0, "ready": True}, {"index": 1, "ready": False, "reason": "Unschedulable"}],
            },
        ],
    },
}


STARTUP = Startup(12.0, Cache.WARM, {StartupPhase.PREPARE: 2.0})


def exposed() -> str:
    """Metrics of an operator that has seen one of everything."""
    metrics, cache = OperatorMetrics(), ObjectCache()
    cache.put(pipeline_model.KIND, MODEL)
    readings = [(names.WATCH_AGE, ("pods",), 3.0), (names.QUEUE_DEPTH, (), 0.0), (names.LONGEST_PASS, (), 0.0)]
    readings.append((names.GATEWAY_EXPECTED, ("ns",), 1.0))
    metrics.expose(cache, lambda: iter(readings))
    metrics.count_call("list", "pods", 200)
    metrics.reconciles.labels("done").inc()
    metrics.reconcile_errors.labels("ns", "m", "refused").inc()
    metrics.corrections.labels("pods").inc()
    metrics.count_transition("ns", "m", Transition(("OOMKilled",), ("OOMKilled",), (STARTUP,), (("OOMKilled", 20.0),)))
    return metrics.registry.exposition()[0].decode()


def test_every_metric_of_the_module_is_exposed_with_its_labels_and_none_besides() -> None:
    families = {family.name: family for family in text_string_to_metric_families(exposed())}
    found = {name for name in families if not name.endswith("_created")}
    assert found == {spec.name.removesuffix("_total") for spec in names.ALL_METRICS}
    for spec in names.ALL_METRICS:
        family = families[spec.name.removesuffix("_total")]
        assert family.documentation == spec.help
        own_labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert own_labels == (set(spec.labels) if family.samples else set())


@pytest.mark.parametrize("spec", names.ALL_METRICS, ids=lambda spec: spec.name)
def test_a_name_says_its_unit_and_kind_and_its_help_is_a_sentence(spec: MetricSpec) -> None:
    assert re.fullmatch(r"stageline_operator_[a-z]+(_[a-z]+)*", spec.name)
    assert spec.help.endswith(".")
    assert "pod" not in spec.labels
    assert not re.search(r"_(ms|millis|minutes|bytes_total_total)", spec.name)
    assert list(spec.buckets) == sorted(set(spec.buckets))
    if spec.buckets:
        assert spec.name.endswith("_seconds")


def test_groups_are_counted_by_phase() -> None:
    text = exposed()
    assert 'stageline_operator_groups{model="m",namespace="ns",phase="Failed"} 1.0' in text
    assert 'stageline_operator_models{ready="Unknown"} 1.0' in text


def test_a_model_its_groups_and_what_they_wait_for_are_told_apart() -> None:
    found = {
        (sample.name.removeprefix("stageline_operator_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(exposed())
        for sample in family.samples
    }
    assert found["model_info", "m", "ns", "served"] == 1
    assert (found["model_desired_replicas", "m", "ns"], found["model_ready_replicas", "m", "ns"]) == (2, 1)
    assert (found["model_generation", "m", "ns"], found["model_observed_generation", "m", "ns"]) == (4, 3)
    assert found["model_condition", "Degraded", "RestartBudgetSpent", "True", "m", "ns"] == 1
    assert found["group_phase", "1", "Failed", "m", "ns"] == 1
    assert (found["group_incarnation", "0", "m", "ns"], found["group_incarnation", "1", "m", "ns"]) == (1, 4)
    assert (found["group_restarts_left", "0", "m", "ns"], found["group_restarts_left", "1", "m", "ns"]) == (3, 1)
    used = (found["group_recent_restarts", "0", "m", "ns"], found["group_recent_restarts", "1", "m", "ns"])
    assert used == (0, 2)
    assert {key: value for key, value in found.items() if key[0].startswith("group_last_failure")} == {
        ("group_last_failure_timestamp_seconds", "1", "1", "OOMKilled", "m", "ns"): NOW.timestamp() - 10
    }
    assert [key for key in found if key[0] == "stage_not_ready"] == [
        ("stage_not_ready", "1", "1", "Unschedulable", "m", "ns")
    ]


def test_a_suspended_model_asks_for_no_group() -> None:
    manifest = MODEL | {"spec": MODEL["spec"] | {"suspend": True}}
    readings = {spec: value for spec, _, value in gauges_of(manifest, recorded_status(manifest), NOW)}
    assert readings[names.MODEL_DESIRED_REPLICAS] == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposed(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_health_and_readiness_say_why_not() -> None:
    async def ask() -> list[tuple[int, str]]:
        problems = ["", "the cluster has not been listed yet"]
        server = HttpEndpoints(OperatorMetrics().registry, lambda: problems[0], lambda: problems[1])
        await server.start("127.0.0.1", 0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=60) as client:
            answers = [await client.get(path) for path in ("/healthz", "/readyz", "/metrics")]
        await server.close()
        return [(answer.status_code, answer.text) for answer in answers[:2]] + [(answers[2].status_code, "")]

    assert asyncio.run(ask()) == [(200, "ok\n"), (503, "the cluster has not been listed yet\n"), (200, "")]
