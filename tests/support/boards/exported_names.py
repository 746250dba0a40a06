"""What the real endpoints export: a running pipeline of two stages, the gateway before it, and an operator.

Boards and rules are held against these pages, so that no name in them is one that nothing exports. The pages are made
once per test session (fixture `exported_pages`), which takes some seconds, and shared by all workers.
"""

import fcntl
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from cluster.fake_kube_api import MODELS, fake_kube_api
from cluster.operator_under_test import OperatorReplica, operator_replica
from oracles.pipeline_checks import greedy
from oracles.tiny_models import write_tiny_llama, write_tiny_tokenizer
from processes.gateway_harness import eventually, running_gateway
from processes.running_group import RunningGroup, running_group
from stageline_api import ports
from stageline_api.telemetry.metric_spec import MetricKind
from stageline_bench.runtime.paced import write_paced_model
from stageline_gateway.settings import GatewaySettings

SERVED_NAME: Final = "tiny"
PACED_STAGE: Final = ("-m", "stageline_bench.runtime.group.paced_stage", "0.002", "0")
OPEN_METRICS: Final = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
SUFFIXES: Final = {MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"), MetricKind.COUNTER: ("_total",)}


def exported_names(pages: Mapping[str, str]) -> frozenset[str]:
    """Every name that a query may select: counters with `_total`, histograms with their three suffixes."""
    return frozenset(
        family.name + suffix
        for page in pages.values()
        for family in text_string_to_metric_families(page)
        for suffix in SUFFIXES.get(MetricKind(family.type), ("",))
    )


def exported_labels(pages: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """The exporters' own labels of each name that has a sample on the pages."""
    found: dict[str, set[str]] = {}
    for page in pages.values():
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return {name: frozenset(labels) for name, labels in found.items()}


def pages_once(shared: Path) -> dict[str, str]:
    """Pages by component (`stage`, `engine`, `gateway`, `operator`), made by whoever comes to `shared` first."""
    shared.mkdir(parents=True, exist_ok=True)
    kept = shared / "pages.json"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(_pages(shared)), encoding="utf-8")
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def _pages(directory: Path) -> dict[str, str]:
    model = write_paced_model(directory / "model", 2)
    write_tiny_tokenizer(model)
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128}
    with running_group(directory / "group", model, 2, stage_command=PACED_STAGE, **settings) as running:
        gateway_page = _gateway_page(directory, running)
        stage_pages = [_page(f"http://{address}:{ports.STAGE_HEALTH}") for address in running.addresses]
        engine_page = _page(running.url)
    # The last stage's page besides would repeat every family.
    return {
        "stage": stage_pages[0],
        "rank": _of_ranks(_page_of_ranks(directory / "ranks"), stage_pages[0]),
        "engine": engine_page,
        "gateway": gateway_page,
        "operator": _operator_page(directory),
    }


def _page_of_ranks(directory: Path) -> str:
    """The page of a stage of two ranks after an answer."""
    model = write_tiny_llama(directory / "model")
    with running_group(directory / "group", model, 1, max_num_seqs=4, max_model_len=128, tensor=2) as running:
        running.generate_all([(1, 2, 3)], [greedy(4)])
        return _page(f"http://{running.addresses[0]}:{ports.STAGE_HEALTH}")


def _of_ranks(page: str, page_of_one_process: str) -> str:
    """The families that ranks add to a stage's page, which has all others once, as that of one process has them."""
    families = [family.name for family in text_string_to_metric_families(page)]
    of_one = [family.name for family in text_string_to_metric_families(page_of_one_process)]
    added = [name for name in families if name not in of_one]
    assert sorted(families) == sorted([*of_one, *added]), families
    parts = re.split(r"^(?=# HELP )", page, flags=re.MULTILINE)[1:]
    return "".join(part for part in parts if part.split(" ")[2].removesuffix("_total") in added)


def _gateway_page(directory: Path, running: RunningGroup) -> str:
    """The gateway's page after an answer, a stream and a refusal."""
    with running_gateway(GatewaySettings(directory / "endpoints.json")) as gateway:
        gateway.serve(running.endpoint)
        ask = {"model": SERVED_NAME, "prompt": "abc", "max_tokens": 8, "ignore_eos": True}
        eventually(lambda: _is_answered(gateway.http, ask), "the gateway did not answer", 60)
        assert _is_answered(gateway.http, ask | {"stream": True})
        assert gateway.http.post("/v1/completions", json=ask | {"model": "unknown"}).status_code == 404
        return _page(str(gateway.admin.base_url))


def _is_answered(client: httpx.Client, ask: Mapping[str, Any]) -> bool:
    return client.post("/v1/completions", json=dict(ask)).is_success


def _operator_page(directory: Path) -> str:
    """The page of an operator process that sees one model and may write nothing."""
    with fake_kube_api() as api:
        api.put(MODELS, _model())
        api.write_kubeconfig(directory / "kubeconfig")
        options = ("--no-leader-elect", "--namespace", "here")
        with operator_replica(directory / "kubeconfig", directory / "operator.log", *options) as operator:
            eventually(lambda: _sees_the_model(operator), operator.log, 60)
            page = _page(f"http://127.0.0.1:{operator.port}")
            operator.end()
    return page


def _sees_the_model(operator: OperatorReplica) -> bool:
    passes = operator.samples("stageline_operator_reconcile_duration_seconds_count")
    return bool(operator.samples("stageline_operator_group_phase")) and sum(passes.values()) > 0


def _model() -> dict[str, Any]:
    now = datetime.now(UTC).isoformat()
    stages = [{"index": 0, "ready": True}, {"index": 1, "ready": False, "reason": "Unschedulable"}]
    life: dict[str, Any] = {"index": 0, "incarnation": 2, "phase": "Starting", "restarts": [now], "stages": stages}
    condition = {"type": "Ready", "status": "False", "reason": "GroupsStarting", "lastTransitionTime": now}
    failure = {"time": now, "group": 0, "incarnation": 1, "stage": 1, "failureClass": "Killed"}
    return {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {
            "name": SERVED_NAME,
            "namespace": "here",
            "uid": "uid-tiny",
            "resourceVersion": "7",
            "generation": 2,
        },
        "spec": {"model": {"source": "file:///models/tiny"}, "parallelism": {"pipeline": 2}},
        "status": {"observedGeneration": 1, "groups": [life], "conditions": [condition], "lastFailures": [failure]},
    }


def _page(base_url: str) -> str:
    """What Prometheus gets; in OpenMetrics, which is stricter, it must be the same families."""
    answer = httpx.get(f"{base_url}/metrics", timeout=60, trust_env=False)
    assert answer.is_success, answer
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4"), answer.headers
    open_metrics = httpx.get(f"{base_url}/metrics", headers=OPEN_METRICS, timeout=60, trust_env=False)
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = [family.name for family in openmetrics_families(open_metrics.text)]  # type: ignore[no-untyped-call]
    assert set(families) == {family.name for family in text_string_to_metric_families(answer.text)}
    return answer.text


def missing_names(used: Iterable[str], pages: Mapping[str, str]) -> list[str]:
    """Of the names used, those of Stageline's that nothing exports."""
    return sorted({name for name in used if name.startswith("stageline_")} - exported_names(pages))
