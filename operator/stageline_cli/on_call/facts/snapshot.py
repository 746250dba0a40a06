"""Turns objects and two readings into facts, with one sentence on what each group waits for. Pure.

Objects decide what exists and its phase; readings add details that only the processes know. Without a second reading
there are no shares and no rates.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from stageline_api import labels
from stageline_api.conditions import ConditionType, Reason
from stageline_api.failures import place_of
from stageline_api.health import Phase, StageStatus
from stageline_api.resource.life.recorded_status import read_status
from stageline_api.resource.life.status import FailureRecord, GroupStatus, PipelineModelStatus, StageObserved
from stageline_cli.on_call.facts.activity import (
    counter_rate,
    draft_figures,
    pipeline_facts,
    stage_activity,
    traffic_facts,
)
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
from stageline_cli.on_call.facts.samples import Samples
from stageline_cli.on_call.facts.scrape import PodReading, Reading
from stageline_cli.on_call.sources.source import ModelObjects
from stageline_operator.planner.group.failure import recent_restarts, restart_policy
from stageline_operator.planner.types import GroupPhase
from stageline_runtime import metric_names as runtime

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
        failures=tuple(FailureFacts(**one.model_dump(exclude={"reason"})) for one in status.last_failures),
        traffic=_traffic(model, earlier, later),
    )


def _status_of(manifest: Mapping[str, Any]) -> PipelineModelStatus:
    return read_status(manifest.get("status"))


def _health(model: ModelObjects, status: PipelineModelStatus, ready: int, wanted: int) -> Health:
    if not model.is_up:
        return Health.ENDED
    if model.manifest["spec"].get("suspend"):
        return Health.SUSPENDED
    if not wanted:
        return Health.SCALED_TO_ZERO
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
        kv_tokens=_whole(samples.value(runtime.STAGE_KV_TOKENS.name)),
        kv_capacity_tokens=_whole(samples.value(runtime.STAGE_KV_CAPACITY.name)),
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
    acceptance, per_row = draft_figures(before.engine_samples, samples) if has_two else (None, None)
    return EngineFacts(
        phase=own.phase.value,
        requests_running=own.requests_running,
        requests_waiting=own.requests_waiting,
        kv_usage_ratio=samples.value(runtime.KV_CACHE_USAGE.name),
        tokens_per_second=counter_rate(before.engine_samples, samples, runtime.GENERATION_TOKENS.name, seconds)
        if has_two
        else None,
        preemptions=_whole(samples.value(runtime.PREEMPTIONS.name)),
        draft_acceptance=acceptance,
        tokens_per_drafted_row=per_row,
    )


def _traffic(model: ModelObjects, earlier: Reading, later: Reading) -> TrafficFacts | None:
    pairs = [
        tuple(reading.gateways.get(one.url, Samples()).of_namespace(model.namespace) for reading in (earlier, later))
        for one in model.gateways
    ]
    told_twice = [(before, after) for before, after in pairs if before.by_name and after.by_name]
    seconds = later.gateways_at_seconds - earlier.gateways_at_seconds
    return traffic_facts(told_twice, seconds, model.served_name)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


_NO_POD: Final = "NoPod"


def waits_for(
    group: GroupStatus,
    stages: Sequence[StageFacts],
    engine: EngineFacts | None,
    failure: FailureRecord | None,
    now: datetime,
) -> str:
    """What the group waits for; empty if it serves. `failure` is its latest."""
    match group.phase:
        case GroupPhase.READY:
            return ""
        case GroupPhase.CREATING | GroupPhase.STARTING:
            return _slowest_start(stages)
        case GroupPhase.TERMINATING:
            return f"its pods to end{_after(failure)}"
        case GroupPhase.BACKING_OFF:
            return f"its next start{_at(group.backoff_until, now)}{_after(failure)}"
        case GroupPhase.WAITING:
            return f"nodes for all of its stages at once; tries again{_at(group.backoff_until, now)}"
        case GroupPhase.FAILED:
            return f"you: it stays down until the template or the annotation {labels.RESTART} changes{_after(failure)}"
        case GroupPhase.REPLACING:
            return f"{_answers(engine)}, then restarts with the changed template"
        case GroupPhase.DRAINING:
            return f"{_answers(engine)}, then is gone"
        case _:
            return ""


def _slowest_start(stages: Sequence[StageFacts]) -> str:
    late = [one for one in stages if not one.is_ready]
    if not late:
        return "the operator's next reconcile: all stages are ready"
    # A stage without a pod adds nothing that the messages of its neighbours don't explain.
    said = [one for one in late if one.message and one.phase != _NO_POD]
    first = (said or late)[0]
    loaded = "" if first.loaded_share is None else f" {first.loaded_share:.0%}"
    words = f": {first.message}" if first.message else ""
    others = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    return f"stage {first.stage}, {first.phase}{loaded}{words}{others}"


def _at(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return ""
    seconds = (moment - now).total_seconds()
    return f" in {seconds:.0f} s" if seconds >= 1 else " now"


def _after(failure: FailureRecord | None) -> str:
    if failure is None:
        return ""
    stage = "" if failure.stage is None else f" of {place_of(failure.stage, failure.rank)}"
    return f" (after {failure.failure_class}{stage})"


def _answers(engine: EngineFacts | None) -> str:
    if engine is None:
        return "its pods to end"
    return f"{engine.requests_running + engine.requests_waiting} answers in progress"
