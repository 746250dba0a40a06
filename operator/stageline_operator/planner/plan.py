"""`plan` computes the next step of a PipelineModel from its observed state. Pure and total.

There is no memory between passes: every step is derived from the status and the observed objects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from stageline_api.failures import FailureClass
from stageline_api.resource.life.status import FailureRecord, GroupStatus, StageObserved
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.context import Context
from stageline_operator.planner.group.gang import find_first_unplaced
from stageline_operator.planner.group.ladder import GroupStep, begin, delete_pods, phase_of, plan_group
from stageline_operator.planner.group.obstacle import REFUSALS
from stageline_operator.planner.group.stage_rows import shorten_messages
from stageline_operator.planner.objects.shared_objects import plan_shared_objects
from stageline_operator.planner.observed.node_losses import FEW_NODES, LOOK_AGAIN_SECONDS, is_outage
from stageline_operator.planner.observed.observed_pod import (
    ObservedPod,
    given_up_at,
    is_given_up,
    is_silent,
    next_look_seconds,
    read_pod,
)
from stageline_operator.planner.rollout import plan_rollout
from stageline_operator.planner.status.model_status import (
    KEPT_FAILURES,
    kept_pods,
    model_events,
    next_status,
    progress_deadline,
)
from stageline_operator.planner.types import Deletion, GroupPhase, Observed, Plan, Setting

_COSTS_NO_RESTART = (FailureClass.UNSCHEDULABLE, FailureClass.IMAGE_PULL, FailureClass.NOT_STARTED, *REFUSALS)
_RUNNING = (GroupPhase.CREATING, GroupPhase.STARTING, GroupPhase.READY)


def plan(model: PipelineModel, observed: Observed, now: datetime, random_token: str, setting: Setting) -> Plan:
    """The next step. Missing Secrets are created from `random_token`."""
    observed, pods = read_pods(observed, now)
    context = Context.of(model, observed, now, setting)
    if model.metadata.deletion_timestamp is not None:
        return _plan_deletion(context, pods)
    pods_of = {index: [pod for pod in pods if pod.group == index] for index in {pod.group for pod in pods}}
    known = _groups_on_record(context, pods_of)
    steps = _group_steps(context, known, pods_of)
    known_after = (step.status for step in steps if step.status is not None)
    groups = shorten_messages(sorted(known_after, key=lambda group: group.index))
    failures = _keep_failures(steps, observed.status.last_failures)
    gone = {group.index: group.incarnation for group in known} | {each.index: 0 for each in groups}
    retired = max((observed.status.retired_incarnation, *gone.values()))
    status = next_status(context, groups, failures, retired)
    shared = plan_shared_objects(context, groups, kept_pods(status, pods, model.spec.replicas), random_token)
    waits = [step.requeue_after_seconds for step in steps] + [progress_deadline(context, status)]
    waits += [None if observed.sees_nodes else next_look_seconds(observed.pods, now)]
    waits += [LOOK_AGAIN_SECONDS if any(pod.node in observed.unheard_nodes for pod in pods) else None]
    return Plan(
        status=status,
        apply=(*shared.apply, *(pod for step in steps for pod in step.apply)),
        delete=(*shared.delete, *(each for step in steps for each in step.delete)),
        requeue_after_seconds=min((seconds for seconds in waits if seconds is not None), default=None),
        events=(*model_events(context, status), *shared.events, *(event for step in steps for event in step.events)),
        needed_by=shared.needed_by,
    )


def read_pods(observed: Observed, now: datetime) -> tuple[Observed, list[ObservedPod]]:
    """All pods, and the observed state completed by what pods show of their nodes, if nodes can't be read."""
    observed = observed if observed.sees_nodes else _with_losses_from_pods(observed)
    return observed, [_read(pod, observed, now) for pod in observed.pods]


def _read(pod: Mapping[str, Any], observed: Observed, now: datetime) -> ObservedPod:
    trouble = observed.trouble_of_pod.get(pod["metadata"]["name"])
    seen = read_pod(pod, now, observed.lost_nodes, trouble, observed.unheard_nodes)
    if observed.sees_nodes or seen.lost or seen.unheard:
        return seen
    lost_at = given_up_at(pod)
    return replace(seen, lost=lost_at is not None and lost_at <= now)


def _with_losses_from_pods(observed: Observed) -> Observed:
    """If nodes can't be read: those of the model's own nodes that are silent at once, as pods show it.

    A node whose pods the control plane evicts is certainly lost; the others may be silent for another reason.
    """
    placed = [(name, pod) for pod in observed.pods if (name := pod.get("spec", {}).get("nodeName"))]
    nodes = {name for name, _ in placed}
    silent = {name for name, pod in placed if is_silent(pod)} - {name for name, pod in placed if is_given_up(pod)}
    if len(silent) <= FEW_NODES or not is_outage(len(silent), len(nodes)):
        return observed
    why = f"{len(silent)} of {len(nodes)} nodes can't be reached, which looks like an outage"
    return replace(observed, unheard_nodes=frozenset(silent), unheard_why=why)


def _groups_on_record(context: Context, pods_of: Mapping[int, Sequence[ObservedPod]]) -> list[GroupStatus]:
    """Groups of the status, and groups known only from their pods, because a status was lost."""
    recorded = context.observed.status.groups
    known = {group.index: group.model_copy(update={"phase": phase_of(group)}) for group in recorded}
    for index, pods in pods_of.items():
        if index not in known:
            known[index] = _adopt(context, index, pods)
    return [known[index] for index in sorted(known)]


def _adopt(context: Context, index: int, pods: Sequence[ObservedPod]) -> GroupStatus:
    """Rebuild the status of an unrecorded group from its pods of the highest incarnation; `pods` are all of its pods.

    A running group continues, and a rollout takes it later. Only a group that is ending, or that was made for a deleted
    model of the same name, is replaced.
    """
    incarnation = max(pod.incarnation for pod in pods)
    own = [pod for pod in pods if pod.incarnation == incarnation]
    found = GroupStatus(index=index, incarnation=incarnation, phase=GroupPhase.REPLACING, since=context.now)
    is_ours = all(pod.owner == (context.model.metadata.uid or "") for pod in own)
    if not is_ours or all(pod.deleting for pod in own):
        return found
    revision = own[0].revision
    model = context.model_at(revision)
    count = max(pod.stage for pod in own) + 1 if model is None else model.spec.parallelism.pipeline
    rows = tuple(StageObserved(index=stage) for stage in range(count))
    # A group without a ready pod may have lost its operator while pods were created: create the rest.
    phase = GroupPhase.STARTING if any(pod.ready or pod.unheard for pod in own) else GroupPhase.CREATING
    return found.model_copy(update={"revision": revision, "phase": phase, "stages": rows})


def _group_steps(
    context: Context, known: Sequence[GroupStatus], pods_of: Mapping[int, Sequence[ObservedPod]]
) -> list[GroupStep]:
    stage_counts = {group.index: context.stage_count(group) for group in known}
    serving = {each.index for each in known if _serves(each, pods_of.get(each.index, ()), stage_counts[each.index])}
    rollout = plan_rollout(context, known, serving)
    first_unplaced = find_first_unplaced(known, pods_of, stage_counts)
    recorded = {group.index for group in context.observed.status.groups}
    steps = [
        plan_group(
            context, group, pods_of.get(group.index, ()), rollout.turn_of(group), first_unplaced.get(group.revision)
        )
        if group.index in recorded
        else GroupStep(group, requeue_after_seconds=0.0)  # record the group before anything is done about it
        for group in known
    ]
    above = context.observed.status.retired_incarnation
    fresh = (GroupStatus(index=index, incarnation=above) for index in rollout.created)
    return steps + [begin(context, group, context.revision) for group in fresh]


def _serves(group: GroupStatus, pods: Sequence[ObservedPod], stage_count: int) -> bool:
    ready = [pod for pod in pods if (pod.ready or pod.unheard) and not (pod.deleting or pod.lost or pod.ends)]
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


def plan_ending(observed: Observed, now: datetime) -> tuple[Deletion, ...]:
    """Deletions for a model that the garbage collector deletes: pods whose kubelet will never confirm their end.

    Only pods that are already being deleted, so that no user's decision is anticipated. Without this, a foreground
    deletion of the model waits for a dead node.
    """
    pods = (_read(pod, observed, now) for pod in observed.pods)
    return tuple(Deletion("Pod", pod.name, 0.0) for pod in pods if pod.deleting and pod.lost)


def _plan_deletion(context: Context, pods: Sequence[ObservedPod]) -> Plan:
    """Drain the pods first: they still read the config and the secret."""
    if pods:
        deletions = delete_pods(pods, grace_seconds=None)
    else:
        deletions = tuple(Deletion(kind, name) for kind, name in sorted(context.observed.objects) if kind != "Pod")
    return Plan(status=context.observed.status, delete=deletions)
