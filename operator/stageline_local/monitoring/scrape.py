"""Prometheus' configuration: scrape targets, and rules with alerts that fire sooner in drills. Pure.

Targets have the labels that a cluster's PodMonitor and ServiceMonitor add: `namespace`, `model`, `group` and `pod`. The
exporters' own labels are `model_name` and `stage`, so none collides. Only the operator's series set namespace and model
themselves (`honor_labels`). A drill divides every `for` and `keep_firing_for` by a factor; expressions and their
windows don't change. Rules are evaluated at every scrape, which is cheap with a few models.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from stageline_api import labels, ports

STAGE_JOB: Final = "stageline-stage"
ENGINE_JOB: Final = "stageline-engine"
GATEWAY_JOB: Final = "stageline-gateway"
OPERATOR_JOB: Final = "stageline-operator"
OPERATOR_PATH: Final = "/operator/metrics"
"""Path of the operator's metrics on the page's server."""

TargetGroup = dict[str, Any]
"""`{"targets": ["address:port"], "labels": {…}}`, the form of Prometheus' file_sd."""


def pod_targets(pods: Iterable[Mapping[str, Any]]) -> dict[str, list[TargetGroup]]:
    """Targets by job. Pods that are not running are omitted."""
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
            engines.append(_target(status["podIP"], ports.ENGINE_STATE, own))
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
    """Prometheus' configuration: pods from the files in `targets_dir`, gateway and operator at fixed addresses."""
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
    return targets_dir / f"{job}.json"


def _files(targets_dir: Path, job: str) -> dict[str, Any]:
    return {"files": [str(targets_file(targets_dir, job))], "refresh_interval": "5s"}


def _alone(address: str, namespace: str, pod: str) -> TargetGroup:
    return {"targets": [address], "labels": {"namespace": namespace, "pod": pod}}


_UNIT_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
_PART: Final = re.compile(r"(\d+)(ms|[smhdwy])")
_HOLDS: Final = ("for", "keep_firing_for")


def quickened(rules: dict[str, Any], factor: float) -> dict[str, Any]:
    """A rule file's content with every alert's `for` times divided by `factor`, and without intervals."""
    groups = [
        {key: value for key, value in group.items() if key != "interval"}
        | {"rules": [_quick(rule, factor) for rule in group["rules"]]}
        for group in rules["groups"]
    ]
    return rules | {"groups": groups}


def _quick(rule: dict[str, Any], factor: float) -> dict[str, Any]:
    shorter = {key: f"{round(seconds_of(rule[key]) * 1000 / factor)}ms" for key in _HOLDS if key in rule}
    return rule | shorter


def seconds_of(duration: str) -> float:
    """Seconds of a Prometheus duration such as `1h30m`; raises `ValueError` for other texts."""
    if duration == "0":
        return 0.0
    parts = _PART.findall(duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"{duration!r} is not a Prometheus duration")
    return float(sum(int(number) * _UNIT_SECONDS[unit] for number, unit in parts))
