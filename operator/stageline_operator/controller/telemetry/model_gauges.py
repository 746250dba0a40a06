"""Gauges of a PipelineModel's spec and status, for boards and alerts. Pure; read at each scrape."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from stageline_api.resource.life.policy import RestartSpec
from stageline_api.resource.life.status import FailureRecord, GroupStatus, PipelineModelStatus
from stageline_api.telemetry.metric_spec import MetricSpec
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.planner.group.failure import recent_restarts, restart_policy

Reading = tuple[MetricSpec, tuple[str, ...], float]
"""A metric, its label values, and the value."""


def gauges_of(manifest: Mapping[str, Any], status: PipelineModelStatus, now: datetime) -> Iterator[Reading]:
    """All gauges of one model; `status` is the one recorded in `manifest`."""
    metadata, spec = manifest["metadata"], manifest.get("spec") or {}
    key = (metadata["namespace"], metadata["name"])
    model = spec.get("model") or {}
    yield names.MODEL_INFO, (*key, str(model.get("servedName") or metadata["name"])), 1
    desired = 0 if spec.get("suspend") else int(spec.get("replicas", 1))
    yield names.MODEL_DESIRED_REPLICAS, key, desired
    yield names.MODEL_READY_REPLICAS, key, status.ready_replicas
    yield names.MODEL_UPDATED_REPLICAS, key, status.updated_replicas
    yield names.MODEL_GENERATION, key, float(metadata.get("generation") or 0)
    yield names.MODEL_OBSERVED_GENERATION, key, float(status.observed_generation or 0)
    for condition in status.conditions:
        yield names.MODEL_CONDITION, (*key, condition.type, condition.status, condition.reason), 1
    policy = restart_policy(spec)
    for group in status.groups:
        yield from _group_gauges(key, group, policy, now)
        yield from _last_failure(key, group, status.last_failures)


def _group_gauges(key: tuple[str, str], group: GroupStatus, policy: RestartSpec, now: datetime) -> Iterator[Reading]:
    own = (*key, str(group.index))
    yield names.GROUP_PHASE, (*own, group.phase), 1
    yield names.GROUP_INCARNATION, own, group.incarnation
    used = len(recent_restarts(group.restarts, policy, now))
    yield names.GROUP_RECENT_RESTARTS, own, used
    yield names.GROUP_RESTARTS_LEFT, own, max(0, policy.max_restarts - used)
    for stage in group.stages:
        if not stage.ready:
            yield names.STAGE_NOT_READY, (*own, str(stage.index), stage.reason), 1


def _last_failure(key: tuple[str, str], group: GroupStatus, newest_first: Iterable[FailureRecord]) -> Iterator[Reading]:
    last = next((each for each in newest_first if each.group == group.index), None)
    if last is not None:
        stage = "" if last.stage is None else str(last.stage)
        yield names.GROUP_LAST_FAILURE, (*key, str(group.index), stage, last.failure_class), last.time.timestamp()
