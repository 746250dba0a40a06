"""Where a stage pod may run: selectors, tolerations, classes, and affinity to the other stages of its group."""

import re
from collections.abc import Mapping
from typing import Any

from stageline_api import labels
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.gang_objects import gang_metadata, gang_reference, scheduler_name
from stageline_operator.planner.objects.identity import GroupIncarnation

_MOST_WEIGHT = 100


def pod_placement(model: PipelineModel, life: GroupIncarnation, stage: int, gpu_class: str) -> dict[str, Any]:
    """The scheduling fields of a pod spec; `gpu_class` is the default runtime class."""
    template, stages = model.spec.template, model.spec.stages
    selector = dict(template.node_selector) | (dict(stages[stage].node_selector) if stages else {})
    tolerations = [*template.tolerations, *(stages[stage].tolerations if stages else ())]
    wanted: dict[str, Any] = {
        "nodeSelector": selector,
        "tolerations": [each.model_dump(by_alias=True, exclude_none=True) for each in tolerations],
        "affinity": _affinity(model, life),
        "priorityClassName": template.priority_class_name,
        "serviceAccountName": template.service_account_name,
        "schedulerName": scheduler_name(model),
        **gang_reference(model, life),
        "runtimeClassName": template.runtime_class_name or gpu_class,
    }
    return {field: value for field, value in wanted.items() if value}


def given_metadata(model: PipelineModel, life: GroupIncarnation, stage: int) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations of the template, with placeholders filled in, and those of `placement.gang`."""
    value_of = _placeholders(model, life, stage)
    template = model.spec.template
    gang_labels, gang_annotations = gang_metadata(model, life)
    return _filled(template.labels, value_of) | gang_labels, _filled(template.annotations, value_of) | gang_annotations


def given_overlay(model: PipelineModel, life: GroupIncarnation, stage: int) -> dict[str, Any]:
    """The template's pod overlay, with placeholders filled in in every string."""
    filled = _filled_anywhere(model.spec.template.pod_template, _placeholders(model, life, stage))
    assert isinstance(filled, dict)
    return filled


def _filled_anywhere(value: Any, value_of: Mapping[str, str]) -> Any:
    match value:
        case str():
            return _filled_text(value, value_of)
        case dict():
            return {key: _filled_anywhere(each, value_of) for key, each in value.items()}
        case list() | tuple():
            return [_filled_anywhere(each, value_of) for each in value]
        case _:
            return value


def _placeholders(model: PipelineModel, life: GroupIncarnation, stage: int) -> dict[str, str]:
    return {
        "MODEL": model.name,
        "GROUP": str(life.group),
        "INCARNATION": str(life.incarnation),
        "STAGE": str(stage),
        "STAGES": str(model.spec.parallelism.pipeline),
    }


def _filled(texts: Mapping[str, str], value_of: Mapping[str, str]) -> dict[str, str]:
    return {key: _filled_text(text, value_of) for key, text in texts.items()}


def _filled_text(text: str, value_of: Mapping[str, str]) -> str:
    return re.sub(r"\$\(([A-Z]+)\)", lambda found: value_of.get(found[1], found[0]), text)


def _affinity(model: PipelineModel, life: GroupIncarnation) -> dict[str, Any]:
    """The template's affinity, plus `spec.placement` as rules on the pods of the same incarnation."""
    placement, given = model.spec.placement, model.spec.template.affinity
    own = {labels.MODEL: model.name, labels.GROUP: str(life.group), labels.INCARNATION: str(life.incarnation)}
    affinity: dict[str, Any] = given.model_dump(by_alias=True, exclude_none=True)
    if placement.colocate is not None:
        _add(affinity, "podAffinity", "required", _term(own, placement.colocate))
    match placement.spread:
        case "Required":
            _add(affinity, "podAntiAffinity", "required", _term(own, placement.topology_key))
        case "Preferred":
            preferred = {"weight": _MOST_WEIGHT, "podAffinityTerm": _term(own, placement.topology_key)}
            _add(affinity, "podAntiAffinity", "preferred", preferred)
        case "None":
            pass
    return affinity


def _term(matched: Mapping[str, str], topology_key: str) -> dict[str, Any]:
    return {"labelSelector": {"matchLabels": dict(matched)}, "topologyKey": topology_key}


def _add(affinity: dict[str, Any], kind: str, strength: str, term: Mapping[str, Any]) -> None:
    field = f"{strength}DuringSchedulingIgnoredDuringExecution"
    rules = dict(affinity.get(kind, {}))
    rules[field] = [*rules.get(field, []), dict(term)]
    affinity[kind] = rules
