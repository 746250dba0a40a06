"""A model in a cluster, installed as a person installs it, and a Prometheus with the shipped rules that watches it.

Real control plane, chart, operator, gateway and stages; the nodes run pods as processes of this machine. Prometheus is
told what to scrape by files: which targets there are, and their labels, is what the chart's monitors would say.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import helm_python
import httpx
import yaml

from boards.backfilled_prometheus import PROMETHEUS
from cluster.api import ClusterApi, wait_until
from cluster.installed_chart import node_values, until_available
from cluster.model_in_cluster import ModelInCluster, model_from_file
from cluster.rendered_chart import CHART, NAMESPACE, RELEASE
from cluster.simulated_nodes import SimulatedNodes, running_nodes
from cluster.under_test import Cluster, own_cluster
from processes.ended_process import end_process
from processes.free_ports import free_port
from processes.repository_files import ROOT
from stageline_api import labels
from stageline_local.monitoring.options import MonitorOptions
from stageline_local.monitoring.scrape import GATEWAY_JOB, OPERATOR_JOB, TargetGroup, pod_targets, quickened
from stageline_local.node import child_exec
from stageline_local.replaced_file import replace_file

MODELS: Final = "models"
"""The namespace of the models, which the gateway serves."""
RELEASE_LABEL: Final = f"{NAMESPACE}/{RELEASE}"
"""How the chart's monitors name the release."""
CONTROL_NODE: Final = "node-control"
"""Where operator and gateway run, so that a node of the models can be lost without them."""
MODEL_NODES: Final = ("node-a", "node-b")
ADMIN_PORT: Final = 8081
OPERATOR_PORT: Final = 9090
_KEY: Final = "sk-game-day-0123456789abcdef"
_INTERVAL: Final = "5s"
_LOOK_SECONDS: Final = 1.0
_READY_SECONDS: Final = 300.0
_QUIET_SECONDS: Final = 1200.0
"""Alerts that look back a quarter of an hour stay for so long."""
_END_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class WatchedCluster:
    """What a scenario may break. `prometheus` is the base URL of its HTTP API."""

    cluster: Cluster
    nodes: SimulatedNodes
    model: ModelInCluster
    prometheus: str

    def scale(self, component: str, replicas: int) -> None:
        """`kubectl scale` of the release's operator or gateway."""
        self.cluster.kubectl_ok("scale", f"deployment/{RELEASE}-{component}", f"--replicas={replicas}", "-n", NAMESPACE)

    def until_whole(self) -> None:
        """Nothing is broken any more: all Deployments run, the model is ready, and no alert is left."""
        until_available(self.cluster, self.nodes)
        self.model.until_ready()
        wait_until("no alert is left", lambda: not self.alerts(), _QUIET_SECONDS, lambda: str(self.alerts()))

    def alerts(self) -> list[dict[str, Any]]:
        """What fires or is pending."""
        said = httpx.get(f"{self.prometheus}/alerts", trust_env=False, timeout=30.0).raise_for_status()
        return list(said.json()["data"]["alerts"])


@contextmanager
def watched_cluster(directory: Path, cache: Path, alert_speed: float) -> Iterator[WatchedCluster]:
    """SmolLM2 ready on two nodes, whose weights are kept in `cache`; everything ends with the block."""
    with (
        own_cluster(directory / "plane") as cluster,
        running_nodes(cluster, directory / "nodes", (CONTROL_NODE, *MODEL_NODES)) as nodes,
    ):
        nodes.recover()
        _install(cluster)
        until_available(cluster, nodes)
        model = model_from_file(cluster, MODELS, ROOT / "examples" / "smollm2.yaml", nodes)
        model.manifest["spec"]["model"]["cache"] = {"hostPath": str(cache)}
        model.manifest["spec"]["template"] = {"nodeSelector": {"game-day": "models"}}
        model.apply()
        model.until_ready()
        with _prometheus(cluster, directory / "prometheus", alert_speed) as url:
            yield WatchedCluster(cluster, nodes, model, url)


def _install(cluster: Cluster) -> None:
    keys = {"keys": [{"name": "game-day", "sha256": hashlib.sha256(_KEY.encode()).hexdigest()}]}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "gateway-keys", "namespace": NAMESPACE}}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": MODELS}},
        {**secret, "stringData": {"keys.yaml": yaml.safe_dump(keys)}},
    )
    for name in MODEL_NODES:
        cluster.kubectl_ok("label", "node", name, "game-day=models")
    values = node_values(MODELS)
    for component in ("operator", "gateway"):
        values[component]["nodeSelector"] = {"kubernetes.io/hostname": CONTROL_NODE}
    with helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as helm:
        helm.install(CHART, RELEASE, values)


@contextmanager
def _prometheus(cluster: Cluster, directory: Path, alert_speed: float) -> Iterator[str]:
    assert PROMETHEUS is not None, "Prometheus is not installed: sh scripts/install-prometheus"
    directory.mkdir(parents=True)
    (directory / "prometheus.yml").write_text(yaml.safe_dump(_configuration(directory, alert_speed)), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    # It ends with this process, however that ends.
    command = [sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()), PROMETHEUS]
    command += [f"--config.file={directory / 'prometheus.yml'}", f"--web.listen-address={address}"]
    url, over = f"http://{address}/api/v1", threading.Event()
    looker = threading.Thread(target=_keep_looking, args=(cluster, directory, over), daemon=True)
    looker.start()
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--storage.tsdb.path={directory / 'data'}"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        wait_until("Prometheus scrapes every job", lambda: _jobs_up(url) == 4, _READY_SECONDS)
        yield url
    finally:
        over.set()
        looker.join()
        end_process(process, _END_SECONDS)


def _configuration(directory: Path, alert_speed: float) -> dict[str, Any]:
    rules = []
    for path in MonitorOptions.with_shipped(1, alert_speed).rules:
        rules.append(directory / path.name)
        quick = quickened(yaml.safe_load(path.read_text(encoding="utf-8")), alert_speed)
        rules[-1].write_text(yaml.safe_dump(quick), encoding="utf-8")
    return {
        "global": {"scrape_interval": _INTERVAL, "scrape_timeout": _INTERVAL, "evaluation_interval": _INTERVAL},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {
                "job_name": job,
                # As the chart's monitors: only the operator's series name the models' namespaces themselves.
                "honor_labels": job == OPERATOR_JOB,
                "file_sd_configs": [{"files": [str(directory / f"{job}.json")], "refresh_interval": _INTERVAL}],
            }
            for job in (*pod_targets([]), GATEWAY_JOB, OPERATOR_JOB)
        ],
    }


def _keep_looking(cluster: Cluster, directory: Path, over: threading.Event) -> None:
    """Write down what the monitors would find, whenever it changes; a control plane that is slow is asked again."""
    written: dict[str, str] = {}
    with cluster.connect() as client:
        api = ClusterApi(client)
        while not over.wait(_LOOK_SECONDS):
            try:
                found = _targets(api)
            except httpx.HTTPError:
                continue
            for job, groups in found.items():
                text = json.dumps(groups)
                if written.get(job) != text:
                    replace_file(directory / f"{job}.json", text)
                    written[job] = text


def _targets(api: ClusterApi) -> dict[str, list[TargetGroup]]:
    pods = [pod for pod in api.list("Pod", MODELS) if labels.MODEL in pod["metadata"]["labels"]]
    found = pod_targets(pods)
    for groups in found.values():
        for group in groups:
            group["labels"]["release"] = RELEASE_LABEL
    found[GATEWAY_JOB] = _of_component(api, "gateway", ADMIN_PORT, namespace=MODELS)
    found[OPERATOR_JOB] = _of_component(api, "operator", OPERATOR_PORT, release=RELEASE_LABEL)
    return found


def _of_component(api: ClusterApi, component: str, port: int, **own: str) -> list[TargetGroup]:
    pods = api.list("Pod", NAMESPACE, {"app.kubernetes.io/component": component})
    return [
        {"targets": [f"{pod['status']['podIP']}:{port}"], "labels": {"pod": pod["metadata"]["name"], **own}}
        for pod in pods
        if pod["status"].get("podIP") and "deletionTimestamp" not in pod["metadata"]
    ]


def _jobs_up(url: str) -> int:
    try:
        answer = httpx.get(f"{url}/query", params={"query": "group by (job) (up == 1)"}, trust_env=False)
        return len(answer.raise_for_status().json()["data"]["result"])
    except httpx.HTTPError:
        return 0
