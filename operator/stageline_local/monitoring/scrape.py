"""What Prometheus is told to scrape: its configuration, and the pods of the moment. Pure.

Targets carry the labels that a cluster's PodMonitor and ServiceMonitor give: `namespace`, `model`, `group` and `pod`.
The exporters' own labels are `model_name` and `stage`, so none hides another; only the operator's series name namespace
and model themselves, and keep theirs.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from stageline_api import labels, ports

STAGE_JOB: Final = "stageline-stage"
ENGINE_JOB: Final = "stageline-engine"
GATEWAY_JOB: Final = "stageline-gateway"
OPERATOR_JOB: Final = "stageline-operator"
OPERATOR_PATH: Final = "/operator/metrics"
"""Where the page's server shows what the operator would export."""

TargetGroup = dict[str, Any]
"""`{"targets": ["address:port"], "labels": {…}}`, the form of Prometheus' file_sd."""


def pod_targets(pods: Iterable[Mapping[str, Any]]) -> dict[str, list[TargetGroup]]:
    """Targets by job. A pod that does not run yet, or not any more, has nothing to say and is left out."""
    stages, engines = [], []
    for pod in pods:
        metadata, status = pod["metadata"], pod["status"]
        if status.get("phase") != "Running" or not status.get("podIP") or "deletionTimestamp" in metadata:
            continue
        own = {
            "namespace": metadata.get("namespace", "default"),
            "model": metadata["labels"][labels.MODEL],
            "group": metadata["labels"][labels.GROUP],
            "pod": metadata["name"],
        }
        stages.append(_target(status["podIP"], ports.STAGE_HEALTH, own))
        if metadata["labels"][labels.STAGE] == "0":
            engines.append(_target(status["podIP"], ports.ENGINE_HTTP, own))
    return {STAGE_JOB: stages, ENGINE_JOB: engines}


def _target(address: str, port: int, own_labels: Mapping[str, str]) -> TargetGroup:
    return {"targets": [f"{address}:{port}"], "labels": dict(own_labels)}


def prometheus_config(
    targets_dir: Path,
    rules: Iterable[Path],
    namespace: str,
    gateway_address: str,
    operator_address: str,
    interval_seconds: int,
) -> dict[str, Any]:
    """Prometheus' configuration: pods from the files in `targets_dir`, gateway and operator where they always are."""
    seconds = f"{interval_seconds}s"
    return {
        "global": {"scrape_interval": seconds, "scrape_timeout": seconds, "evaluation_interval": seconds},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            *({"job_name": job, "file_sd_configs": [_files(targets_dir, job)]} for job in (STAGE_JOB, ENGINE_JOB)),
            {"job_name": GATEWAY_JOB, "static_configs": [_alone(gateway_address, namespace, "gateway")]},
            {
                "job_name": OPERATOR_JOB,
                "metrics_path": OPERATOR_PATH,
                "honor_labels": True,
                "static_configs": [_alone(operator_address, namespace, "operator")],
            },
        ],
    }


def targets_file(targets_dir: Path, job: str) -> Path:
    """The file that lists a job's targets."""
    return targets_dir / f"{job}.json"


def _files(targets_dir: Path, job: str) -> dict[str, Any]:
    return {"files": [str(targets_file(targets_dir, job))], "refresh_interval": "5s"}


def _alone(address: str, namespace: str, pod: str) -> TargetGroup:
    return {"targets": [address], "labels": {"namespace": namespace, "pod": pod}}
