"""`plan`: from a PipelineModel and what is observed of it to the one next step. Pure and total.

Nothing is remembered between passes: the status carries what must survive, and every step is derived from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from stageline_api.failures import FailureClass
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.status import FailureRecord, GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.group.gang import find_first_unplaced
from stageline_operator.planner.group.ladder import GroupStep, begin, delete_pods, phase_of, plan_group
from stageline_operator.planner.objects.shared_objects import plan_shared_objects
from stageline_operator.planner.observed.observed_pod import ObservedPod, given_up_at, next_look_seconds, read_pod
from stageline_operator.planner.rollout import plan_rollout
from stageline_operator.planner.status.model_status import KEPT_FAILURES, model_events, next_status, progress_deadline
from stageline_operator.planner.types import Deletion, GroupPhase, Observed, Plan, Setting

_COSTS_NO_RESTART = (FailureClass.UNSCHEDULABLE, FailureClass.IMAGE_PULL, FailureClass.NOT_STARTED)
_RUNNING = (GroupPhase.CREATING, GroupPhase.STARTING, GroupPhase.READY)


def plan(model: PipelineModel, observed: Observed, now: datetime, random_token: str, setting: Setting) -> Plan:
    """The next step. `random_token` becomes the plan bus's secret when there is none yet."""
    context = Context.of(model, observed, now, setting)
    pods = [_read(pod, observed, now) for pod in observed.pods]
    if model.metadata.deletion_timestamp is not None:
        return _plan_deletion(context, pods)
    pods_of = {index: [pod for pod in pods if pod.group == index] for index in {pod.group for pod in pods}}
    known = _groups_on_record(context, pods_of)
    steps = _group_steps(context, known, pods_of)
    groups = tuple(sorted((s.status for s in steps if s.status is not None), key=lambda group: group.index))
    failures = _keep_failures(steps, observed.status.last_failures)
    gone = {group.index: group.incarnation for group in known} | {each.index: 0 for each in groups}
    retired = max((observed.status.retired_incarnation, *gone.values()))
    shared = plan_shared_objects(context, groups, random_token)
    status = next_status(context, groups, failures, retired)
    waits = [step.requeue_after_seconds for step in steps] + [progress_deadline(context, status)]
    waits += [None if observed.sees_nodes else next_look_seconds(observed.pods, now)]
    return Plan(
        status=status,
        apply=(*shared.apply, *(pod for step in steps for pod in step.apply)),
        delete=(*shared.delete, *(each for step in steps for each in step.delete)),
        requeue_after_seconds=min((seconds for seconds in waits if seconds is not None), default=None),
        events=(*model_events(context, status), *shared.events, *(event for step in steps for event in step.events)),
    )


def _read(pod: Mapping[str, Any], observed: Observed, now: datetime) -> ObservedPod:
    seen = read_pod(pod, now, observed.lost_nodes, observed.trouble_of_pod.get(pod["metadata"]["name"]))
    if observed.sees_nodes or seen.lost:
        return seen
    lost_at = given_up_at(pod)
    return replace(seen, lost=lost_at is not None and lost_at <= now)


def _groups_on_record(context: Context, pods_of: Mapping[int, Sequence[ObservedPod]]) -> list[GroupStatus]:
    """Groups of the status, and groups that only their pods show, since a status was lost."""
    recorded = context.observed.status.groups
    known = {group.index: group.model_copy(update={"phase": phase_of(group)}) for group in recorded}
    for index, pods in pods_of.items():
        highest = max(pod.incarnation for pod in pods)
        unremembered = GroupStatus(index=index, incarnation=highest, phase=GroupPhase.REPLACING)
        known.setdefault(index, unremembered)
    return [known[index] for index in sorted(known)]


def _group_steps(
    context: Context, known: Sequence[GroupStatus], pods_of: Mapping[int, Sequence[ObservedPod]]
) -> list[GroupStep]:
    stage_counts = {group.index: context.stage_count(group) for group in known}
    serving = {each.index for each in known if _serves(each, pods_of.get(each.index, ()), stage_counts[each.index])}
    rollout = plan_rollout(context, known, serving)
    first_unplaced = find_first_unplaced(known, pods_of, stage_counts)
    steps = [
        plan_group(context, group, pods_of.get(group.index, ()), rollout.turn_of(group), first_unplaced)
        for group in known
    ]
    above = context.observed.status.retired_incarnation
    fresh = (GroupStatus(index=index, incarnation=above) for index in rollout.created)
    return steps + [begin(context, group, context.revision) for group in fresh]


def _serves(group: GroupStatus, pods: Sequence[ObservedPod], stage_count: int) -> bool:
    ready = [pod for pod in pods if pod.ready and not (pod.deleting or pod.lost or pod.ends)]
    own = {pod.stage for pod in ready if pod.incarnation == group.incarnation}
    return group.phase in _RUNNING and stage_count > 0 and len(own) == stage_count


def _keep_failures(steps: Sequence[GroupStep], kept: Sequence[FailureRecord]) -> tuple[FailureRecord, ...]:
    """New failures before old ones. An incarnation has one record, a group one of each class that costs no restart."""
    new = sorted((s.failure for s in steps if s.failure is not None), key=lambda failure: failure.time, reverse=True)
    replaced = {(each.group, each.incarnation) for each in new}
    waits = {(each.group, each.failure_class) for each in new if each.failure_class in _COSTS_NO_RESTART}
    old = [
        each
        for each in kept
        if (each.group, each.incarnation) not in replaced and (each.group, each.failure_class) not in waits
    ]
    return (*new, *old)[:KEPT_FAILURES]


def _plan_deletion(context: Context, pods: Sequence[ObservedPod]) -> Plan:
    """Drain the pods first: they still read the config and the secret."""
    if pods:
        deletions = delete_pods(pods, grace_seconds=None)
    else:
        deletions = tuple(Deletion(kind, name) for kind, name in sorted(context.observed.objects) if kind != "Pod")
    return Plan(status=context.observed.status, delete=deletions)
