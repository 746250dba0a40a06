"""A PipelineModel that the cluster accepted and this version refuses: its groups run on, and its conditions say why.

The spec that it ran with before is in the ConfigMap of its revision, so a group that fails is made again as it was. No
rule of this version holds for that spec, so its plan may fail in any way; the refusal is written all the same.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from stageline_api.conditions import ConditionType, Reason
from stageline_api.manifests.accepted_before import read_accepted_before
from stageline_api.manifests.manifest_loader import parse_manifest
from stageline_api.resource.field_problem import FieldProblem
from stageline_api.resource.life.status import Condition, PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import SHAPELESS_FIELDS, revision_of
from stageline_operator.planner.types import Observed, Plan

_SMALLEST_SPEC: Final[Mapping[str, Any]] = {"model": {"source": "file:///model"}}

_log = logging.getLogger(__name__)


def step_as_before(
    manifest: Mapping[str, Any],
    observed: Observed,
    refused: PipelineModelStatus,
    plan_of: Callable[[PipelineModel], Plan],
) -> Plan | None:
    """The step for what ran before the refusal, telling of both; None where nothing ran or no step can be made."""
    try:
        running = last_accepted(manifest, observed)
        step = None if running is None else plan_of(running)
    except Exception:
        # What was read without rules may break whatever relies on them. Groups are then left as they are.
        where = manifest["metadata"]
        words = "%s/%s is refused, and no step can be planned for what it ran as before"
        _log.exception(words, where.get("namespace"), where.get("name"))
        return None
    if step is None:
        return None
    available = [each for each in step.status.conditions if each.type == ConditionType.AVAILABLE]
    kept = [each for each in refused.conditions if each.type != ConditionType.AVAILABLE]
    update = {"observed_generation": refused.observed_generation, "conditions": tuple(available + kept)}
    return replace(step, status=step.status.model_copy(update=update))


def last_accepted(manifest: Mapping[str, Any], observed: Observed) -> PipelineModel | None:
    """The model as it was before its spec was refused: its groups run on, and those that fail are made again.

    That may be the refused spec itself, where an earlier version accepted it. None where it never ran, or where this
    version can't tell what it ran as.
    """
    status = observed.status
    spec = observed.revision_specs.get(status.update_revision)
    if spec is None or not status.groups:
        return None
    given = manifest.get("spec") or {}
    given_policies = {name: given[name] for name in SHAPELESS_FIELDS if name in given}
    bare = {name: value for name, value in manifest.items() if name not in ("status", "spec")}
    # Each by itself: that one is refused must not resume a model which another one suspends.
    wanted = {name: value for name, value in given_policies.items() if _are_accepted(bare, {name: value})}
    as_many = {"replicas": len(status.groups)}
    if "replicas" in given_policies and "replicas" not in wanted:
        wanted |= as_many
    for read in (_accepted, read_accepted_before):
        for policies in (wanted, as_many):
            if not _are_accepted(bare, policies):
                continue
            model = read(bare | {"spec": {**spec, **policies}})
            if model is not None and revision_of(model) == status.update_revision:
                return model
    return None


def _accepted(manifest: Mapping[str, Any]) -> PipelineModel | None:
    model = parse_manifest(dict(manifest))
    return model if isinstance(model, PipelineModel) else None


def _are_accepted(bare: Mapping[str, Any], policies: Mapping[str, Any]) -> bool:
    """Whether policies are as this version wants them, whatever the spec that they stand in."""
    return _accepted({**bare, "spec": {**_SMALLEST_SPEC, **policies}}) is not None


def refused_status(
    before: PipelineModelStatus, manifest: Mapping[str, Any], problems: Sequence[FieldProblem], now: datetime
) -> PipelineModelStatus:
    """The cluster accepted a spec that this version can't run: conditions name the fields, and groups run on."""
    generation = manifest["metadata"].get("generation")
    sentence = "; ".join(str(problem) for problem in problems)[:32_000]
    verdicts = dict.fromkeys((ConditionType.DEGRADED, ConditionType.STALLED), "True")
    verdicts |= dict.fromkeys((ConditionType.READY, ConditionType.PROGRESSING), "False")
    kept = {condition.type: condition for condition in before.conditions}
    for kind, status in verdicts.items():
        known = kept.get(kind)
        kept[kind] = Condition(
            type=kind,
            status="True" if status == "True" else "False",
            observed_generation=generation,
            last_transition_time=known.last_transition_time if known and known.status == status else now,
            reason=Reason.BAD_CONFIGURATION,
            message=sentence,
        )
    return before.model_copy(update={"observed_generation": generation, "conditions": tuple(kept.values())})
