"""From objects and two readings to facts. Pure.

Objects decide what exists and in which phase it is; readings add what only the processes know. Without a second
reading there are no shares and no rates.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from stageline_api.conditions import ConditionType, Reason
from stageline_api.health import Phase, StageStatus
from stageline_api.resource.recorded_status import read_status
from stageline_api.resource.status import FailureRecord, GroupStatus, PipelineModelStatus, StageObserved
from stageline_cli.on_call.facts import metric_names as metrics
from stageline_cli.on_call.facts.activity import counter_rate, pipeline_facts, stage_activity, traffic_facts
from stageline_cli.on_call.facts.facts import (
    ConditionFacts,
    EngineFacts,
    FailureFacts,
    GroupFacts,
    Health,
    ModelFacts,
    Snapshot,
    StageFacts,
    TrafficFacts,
)
from stageline_cli.on_call.facts.readings import PodReading, Reading
from stageline_cli.on_call.facts.samples import Samples
from stageline_cli.on_call.facts.waiting import waits_for
from stageline_cli.on_call.sources.source import ModelObjects
from stageline_operator.planner.group.failure import recent_restarts, restart_policy
from stageline_operator.planner.types import GroupPhase

_NOTHING = PodReading()
_STARTING = (Reason.GROUPS_STARTING, Reason.ROLLING_OUT)


def build_snapshot(
    where: str, models: Sequence[ModelObjects], earlier: Reading, later: Reading, now: datetime
) -> Snapshot:
    """Facts of all models, in their order."""
    problems = [*(problem for model in models for problem in model.problems), *later.problems]
    facts = tuple(model_facts(model, earlier, later, now) for model in models)
    return Snapshot(now, where, facts, tuple(dict.fromkeys(problems)))


def model_facts(model: ModelObjects, earlier: Reading, later: Reading, now: datetime) -> ModelFacts:
    """Facts of one model. `earlier` may be an empty reading."""
    spec, status = model.manifest["spec"], _status_of(model.manifest)
    wanted = 0 if spec.get("suspend") else int(spec.get("replicas", 1))
    ready = sum(group.phase == GroupPhase.READY for group in status.groups)
    return ModelFacts(
        name=model.name,
        namespace=model.namespace,
        served_name=model.served_name,
        source=str(spec["model"]["source"]),
        url=model.url or status.url,
        health=_health(model, status, ready, wanted),
        ready_groups=ready,
        wanted_groups=wanted,
        updated_groups=status.updated_replicas,
        stage_count=int(spec.get("parallelism", {}).get("pipeline", 1)),
        conditions=tuple(
            ConditionFacts(one.type, one.status == "True", one.reason, one.message, one.last_transition_time)
            for one in status.conditions
        ),
        groups=tuple(_group(model, status, group, earlier, later, now) for group in status.groups),
        failures=tuple(_failure(one) for one in status.last_failures),
        traffic=_traffic(model, earlier, later),
    )


def _status_of(manifest: Mapping[str, Any]) -> PipelineModelStatus:
    return read_status(manifest.get("status"))


def _health(model: ModelObjects, status: PipelineModelStatus, ready: int, wanted: int) -> Health:
    if not model.is_up:
        return Health.ENDED
    if model.manifest["spec"].get("suspend"):
        return Health.SUSPENDED
    conditions = {one.type: one for one in status.conditions}
    if not ready:
        progressing = conditions.get(ConditionType.PROGRESSING)
        starts = progressing is not None and progressing.status == "True" and progressing.reason in _STARTING
        starts = starts and not any(group.restarts or group.attempts for group in status.groups)
        return Health.STARTING if starts else Health.DOWN
    degraded = ConditionType.DEGRADED in conditions and conditions[ConditionType.DEGRADED].status == "True"
    return Health.DEGRADED if degraded or ready < wanted else Health.HEALTHY


def _group(
    model: ModelObjects,
    status: PipelineModelStatus,
    group: GroupStatus,
    earlier: Reading,
    later: Reading,
    now: datetime,
) -> GroupFacts:
    keys = [f"{model.namespace}/{stage.pod}" for stage in group.stages]
    pairs = [(earlier.pods.get(key, _NOTHING), later.pods.get(key, _NOTHING)) for key in keys]
    stages = tuple(_stage(row, before, after) for row, (before, after) in zip(group.stages, pairs, strict=True))
    engine = _engine(*pairs[0], later.at_seconds - earlier.at_seconds) if pairs else None
    policy = restart_policy(model.manifest["spec"])
    failure = next((one for one in status.last_failures if one.group == group.index), None)
    return GroupFacts(
        group=group.index,
        incarnation=group.incarnation,
        revision=group.revision,
        phase=group.phase,
        since=group.since,
        waits_for=waits_for(group, stages, engine, failure, now) if model.is_up else "",
        restarts_in_window=len(recent_restarts(group.restarts, policy, now)),
        max_restarts=policy.max_restarts,
        restart_window_seconds=policy.window_seconds,
        backoff_until=group.backoff_until,
        stages=stages,
        engine=engine,
        pipeline=pipeline_facts({one.stage: one.activity for one in stages if one.activity is not None}),
    )


def _stage(row: StageObserved, before: PodReading, after: PodReading) -> StageFacts:
    own, samples = after.stage, after.stage_samples
    return StageFacts(
        stage=row.index,
        pod=row.pod,
        node=row.node,
        phase=_phase(row, own),
        is_ready=row.ready,
        layers=row.layers or _layers(own),
        message=row.message or (own.message if own is not None else ""),
        waiting_since=row.since,
        loaded_share=own.loaded_bytes / own.total_bytes
        if own and own.phase is Phase.LOADING and own.total_bytes
        else None,
        memory_bytes=own.memory_bytes if own is not None else None,
        kv_tokens=_whole(samples.value(metrics.STAGE_KV_TOKENS)),
        kv_capacity_tokens=_whole(samples.value(metrics.STAGE_KV_CAPACITY)),
        steps=own.steps if own is not None else None,
        activity=stage_activity(before.stage_samples, samples) if before.stage_samples.by_name else None,
    )


def _phase(row: StageObserved, own: StageStatus | None) -> str:
    if row.ready:
        return "Ready"
    return own.phase.value if own is not None else row.reason or "Pending"


def _layers(own: StageStatus | None) -> str:
    return f"{own.layers.first}-{own.layers.last}" if own is not None and own.layers is not None else ""


def _engine(before: PodReading, after: PodReading, seconds: float) -> EngineFacts | None:
    own, samples = after.engine, after.engine_samples
    if own is None:
        return None
    has_two = bool(before.engine_samples.by_name)
    return EngineFacts(
        phase=own.phase.value,
        requests_running=own.requests_running,
        requests_waiting=own.requests_waiting,
        kv_usage_ratio=samples.value(metrics.ENGINE_KV_USAGE),
        tokens_per_second=counter_rate(before.engine_samples, samples, metrics.ENGINE_TOKENS, seconds)
        if has_two
        else None,
        preemptions=_whole(samples.value(metrics.ENGINE_PREEMPTIONS)),
    )


def _traffic(model: ModelObjects, earlier: Reading, later: Reading) -> TrafficFacts | None:
    pairs = [
        (earlier.gateways.get(one.url, Samples()), later.gateways.get(one.url, Samples())) for one in model.gateways
    ]
    told_twice = [(before, after) for before, after in pairs if before.by_name and after.by_name]
    seconds = later.gateways_at_seconds - earlier.gateways_at_seconds
    return traffic_facts(told_twice, seconds, model.served_name)


def _failure(one: FailureRecord) -> FailureFacts:
    return FailureFacts(
        one.time,
        one.group,
        one.incarnation,
        one.stage,
        one.container,
        one.failure_class.value,
        one.exit_code,
        one.message,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
