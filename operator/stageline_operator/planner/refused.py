"""The step for a model whose spec this version refuses: report its state and change nothing.

Its pods are neither created nor deleted. The serving groups and the PodDisruptionBudget follow the pods: an outdated
number would block node drains or protect no pod.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError

from stageline_api.resource.field_problem import FieldProblem
from stageline_api.resource.life.status import GroupStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.context import Context
from stageline_operator.planner.group.stage_rows import shorten_messages, stage_rows
from stageline_operator.planner.objects.shared_objects import changed_budget
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.plan import read_pods
from stageline_operator.planner.status.model_conditions import refused_status
from stageline_operator.planner.status.model_status import kept_pods
from stageline_operator.planner.types import GroupPhase, Observed, Plan, Setting

_MAY_SERVE: Final = (GroupPhase.CREATING, GroupPhase.STARTING, GroupPhase.READY)
_NONE_COMES_BACK: Final = 0
"""Groups that an eviction waits for: no lost group is recreated before the spec is corrected."""


def plan_refused(
    manifest: Mapping[str, Any], problems: Sequence[FieldProblem], observed: Observed, now: datetime, setting: Setting
) -> Plan:
    """Report the state, and update an existing PodDisruptionBudget."""
    observed, pods = read_pods(observed, now)
    accepted = _accepted_before(manifest, observed)
    context = None if accepted is None else Context.of(accepted, observed, now, setting)
    groups = shorten_messages([_observed_group(context, each, pods, now) for each in observed.status.groups])
    ready = sum(group.phase == GroupPhase.READY for group in groups)
    seen = observed.status.model_copy(update={"groups": groups, "ready_replicas": ready})
    status = refused_status(seen, manifest, problems, now)
    budget = () if context is None else changed_budget(context, kept_pods(status, pods, _NONE_COMES_BACK))
    return Plan(status, apply=budget)


def _observed_group(
    context: Context | None, group: GroupStatus, pods: Sequence[ObservedPod], now: datetime
) -> GroupStatus:
    """The group's status from its pods; whether it failed is judged after the spec is corrected."""
    own = [pod for pod in pods if (pod.group, pod.incarnation) == (group.index, group.incarnation)]
    serving = {pod.stage for pod in own if pod.ready and not (pod.deleting or pod.lost or pod.ends)}
    serves = 0 < len(group.stages) == len(serving)
    update: dict[str, Any] = {} if context is None else {"stages": stage_rows(context, group, own)}
    if serves and group.phase in _MAY_SERVE and group.phase != GroupPhase.READY:
        update |= {"phase": GroupPhase.READY, "since": now, "attempts": 0, "served": True}
    elif group.phase == GroupPhase.READY and not serves:
        update |= {"phase": GroupPhase.STARTING, "since": now}
    return group.model_copy(update=update)


def _accepted_before(manifest: Mapping[str, Any], observed: Observed) -> PipelineModel | None:
    """The model at the last accepted revision; None if it is unknown, as before the first one."""
    spec = observed.revision_specs.get(observed.status.update_revision)
    bare = {name: value for name, value in manifest.items() if name != "status"}
    try:
        return None if spec is None else PipelineModel.read_accepted(bare | {"spec": spec})
    except ValidationError:
        return None  # another version of the operator wrote it and accepted a spec that this one refuses
