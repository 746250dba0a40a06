"""`plan`: from a PipelineModel and what is observed of it to the one next step. Pure and total.

Nothing is remembered between passes: the status carries what must survive, and every step is derived from it.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from stageline_api import labels
from stageline_api.pipeline_model import PipelineModel
from stageline_api.spec_status import FailureRecord, GroupStatus, PipelineModelStatus
from stageline_operator.group_plan import GroupStep, plan_group, remove_group
from stageline_operator.model_conditions import model_conditions
from stageline_operator.objects import (
    build_bus_secret,
    build_config_map,
    build_engine_service,
    build_headless_service,
    revision_of,
)
from stageline_operator.objects.identity import config_map_name
from stageline_operator.observed_pod import ObservedPod, read_pod
from stageline_operator.plan import Context, Deletion, GroupPhase, Observed, Plan, Setting

KEPT_FAILURES: Final = 5


def plan(model: PipelineModel, observed: Observed, now: datetime, random_token: str, setting: Setting) -> Plan:
    """The next step. `random_token` becomes the plan bus's secret when there is none yet."""
    revision = revision_of(model, setting.default_image)
    generation = model.metadata.generation
    context = Context(
        model=model,
        setting=setting,
        observed=observed,
        now=now,
        revision=revision,
        spec_changed=observed.status.observed_generation not in (None, generation),
    )
    pods = [read_pod(pod, now) for pod in observed.pods]
    if model.metadata.deletion_timestamp is not None:
        return _plan_deletion(context, pods)
    steps = _group_steps(context, pods)
    groups = tuple(step.status for step in steps if step.status is not None)
    failures = _keep_failures(steps, observed.status.last_failures)
    return Plan(
        status=_status(context, groups, failures),
        apply=(*_shared_objects(context, random_token), *(pod for step in steps for pod in step.apply)),
        delete=(*_stale_config_maps(context, groups), *(each for step in steps for each in step.delete)),
        requeue_after_seconds=min(
            (s.requeue_after_seconds for s in steps if s.requeue_after_seconds is not None), default=None
        ),
        events=tuple(event for step in steps for event in step.events),
    )


def _group_steps(context: Context, pods: Sequence[ObservedPod]) -> list[GroupStep]:
    known = {group.index: group for group in context.observed.status.groups}
    wanted = range(context.model.spec.replicas)
    indices = sorted({*wanted, *known, *(pod.group for pod in pods)})
    replaceable = _replaceable(context, [known[index] for index in wanted if index in known])
    steps = []
    for index in indices:
        own_pods = [pod for pod in pods if pod.group == index]
        if index in wanted:
            steps.append(plan_group(context, index, known.get(index), own_pods, index in replaceable))
        else:
            highest = max((pod.incarnation for pod in own_pods), default=0)
            status = known.get(index, GroupStatus(index=index, incarnation=highest))
            steps.append(remove_group(context, status, own_pods))
    return steps


def _replaceable(context: Context, groups: Sequence[GroupStatus]) -> set[int]:
    """Outdated groups that may be drained now: those that don't answer anyway, else one while all others do."""
    unready = {group.index for group in groups if group.phase != GroupPhase.READY}
    outdated = {group.index for group in groups if group.revision != context.revision}
    if outdated & unready:
        return outdated & unready
    return set() if unready else set(sorted(outdated)[:1])


def _keep_failures(steps: Sequence[GroupStep], kept: Sequence[FailureRecord]) -> tuple[FailureRecord, ...]:
    new = sorted((s.failure for s in steps if s.failure is not None), key=lambda failure: failure.time, reverse=True)
    return (*new, *kept)[:KEPT_FAILURES]


def _shared_objects(context: Context, random_token: str) -> tuple[dict[str, Any], ...]:
    """Objects of the model as a whole that are not there yet."""
    model = context.model
    wanted: list[Mapping[str, Any]] = [
        build_config_map(model, context.revision),
        build_bus_secret(model, random_token),
        build_headless_service(model),
        build_engine_service(model),
    ]
    present = context.observed.objects
    return tuple(dict(each) for each in wanted if (each["kind"], each["metadata"]["name"]) not in present)


def _stale_config_maps(context: Context, groups: Sequence[GroupStatus]) -> tuple[Deletion, ...]:
    """ConfigMaps of revisions that no group runs any more."""
    in_use = {config_map_name(context.model, each) for each in (context.revision, *(g.revision for g in groups))}
    present = sorted(context.observed.objects)
    return tuple(Deletion(kind, name) for kind, name in present if kind == "ConfigMap" and name not in in_use)


def _status(
    context: Context, groups: tuple[GroupStatus, ...], failures: tuple[FailureRecord, ...]
) -> PipelineModelStatus:
    model, before = context.model, context.observed.status
    current = [group for group in groups if group.revision == context.revision]
    return PipelineModelStatus(
        observed_generation=model.metadata.generation,
        replicas=len(groups),
        ready_replicas=sum(group.phase == GroupPhase.READY for group in groups),
        updated_replicas=len(current),
        selector=f"{labels.MODEL}={model.name},{labels.STAGE}=0",
        url=before.url,
        conditions=model_conditions(
            groups,
            failures,
            wanted=model.spec.replicas,
            revision=context.revision,
            generation=model.metadata.generation,
            previous=before.conditions,
            now=context.now,
        ),
        groups=groups,
        last_failures=failures,
    )


def _plan_deletion(context: Context, pods: Sequence[ObservedPod]) -> Plan:
    """Drain the pods first: they still read the config and the secret."""
    if pods:
        deletions = tuple(Deletion("Pod", pod.name) for pod in pods if not pod.deleting)
    else:
        deletions = tuple(Deletion(kind, name) for kind, name in sorted(context.observed.objects) if kind != "Pod")
    return Plan(status=context.observed.status, delete=deletions)
