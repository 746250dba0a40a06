"""Names, labels, owners and revisions of the objects that belong to a PipelineModel."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from stageline_api import labels
from stageline_api.resource.pipeline_model import API_VERSION, KIND, PipelineModel
from stageline_operator.planner.objects.pod_resources import find_step_limits

_REVISION_DIGITS: Final = 10
SHAPELESS_FIELDS: Final = ("autoscaling", "replicas", "restart", "rollout", "suspend")
"""Spec fields that no pod is made from, so changing them replaces nothing."""


@dataclass(frozen=True)
class GroupIncarnation:
    """One incarnation of one group."""

    group: int
    incarnation: int


FIRST_DEFAULTS: Final[dict[str, Any]] = {"engine.maxNumSeqs": 16, "engine.maxNumBatchedTokens": 512}
"""Defaults that have changed, as they were when the field was new, by path: `engine.maxNumSeqs`.

The API server writes defaults into what it stores, where nothing tells them from what a person wrote. So a revision
leaves out what a field was by default at first, in every later version, or a new default would restart every model.
"""


def revision_of(model: PipelineModel) -> str:
    """Hash of what a person asks of the pods. Two models with one revision ask for the same pods.

    First defaults are left out, so an operator that knows more fields, or other defaults, restarts nothing.
    """
    text = json.dumps([shaping_spec(model), model.served_name], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_DIGITS]


def shaping_spec(model: PipelineModel) -> dict[str, Any]:
    """The part of the spec that pods are made from, as a person would write it: without first defaults."""
    spec = model.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    resolved = resolved_spec(model)
    for path, first in FIRST_DEFAULTS.items():
        *sections, field = path.split(".")
        value = _at(resolved, sections).get(field)
        section = spec
        for name in sections:
            section = section.setdefault(name, {})
        section.pop(field, None)
        if value not in (None, first):
            section[field] = value
    for name in ("schedulingSeconds", "resumeWindowSeconds"):
        spec.get("timeouts", {}).pop(name, None)
    return {name: value for name, value in spec.items() if name not in SHAPELESS_FIELDS and value != {}}


def resolved_spec(model: PipelineModel) -> dict[str, Any]:
    """The same with every default, so that what is made of it later is what would be made of it now."""
    spec = model.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    if (limits := find_step_limits(model)) is not None:
        spec["engine"] |= {"maxNumSeqs": limits.max_num_seqs, "maxNumBatchedTokens": limits.max_num_batched_tokens}
    return {name: value for name, value in spec.items() if name not in SHAPELESS_FIELDS}


def _at(spec: dict[str, Any], sections: list[str]) -> dict[str, Any]:
    for name in sections:
        spec = spec.get(name, {})
    return spec


def pod_name(model: PipelineModel, life: GroupIncarnation, stage: int) -> str:
    """`<model>-<group>-<incarnation>-<stage>`."""
    return f"{model.name}-{life.group}-{life.incarnation}-{stage}"


def headless_service_name(model: PipelineModel) -> str:
    return f"{model.name}-stages"


def certificate_name(model: PipelineModel) -> str:
    """The DNS name that all certificates of the model's pods are for: of the Service that all of them are behind."""
    return f"{headless_service_name(model)}.{model.namespace}.svc"


def engine_service_name(model: PipelineModel) -> str:
    return f"{model.name}-engine"


def config_map_name(model: PipelineModel, revision: str) -> str:
    """One ConfigMap for each revision: a group keeps reading the config it was made from."""
    return f"{model.name}-{revision}"


def disruption_budget_name(model: PipelineModel) -> str:
    return model.name


def cache_claim_name(model: PipelineModel, group: int, stage: int) -> str:
    """The same for every incarnation, so that each finds what the one before it fetched."""
    return f"{model.name}-cache-{group}-{stage}"


def incarnation_policy_name(model: PipelineModel, life: GroupIncarnation) -> str:
    return f"{model.name}-{life.group}-{life.incarnation}"


def bus_secret_name(model: PipelineModel) -> str:
    """Secret with the plan bus's shared token.

    The operator may make Secrets and not look at them, so it must be able to tell one life of a model from the next by
    the name: a Secret that is there already is then never one that the garbage collector is about to take.
    """
    uid = model.metadata.uid
    life = "" if uid is None else "-" + hashlib.sha256(uid.encode()).hexdigest()[:8]
    return f"{model.name}-bus{life}"


def model_labels(model: PipelineModel, component: str) -> dict[str, str]:
    return {
        labels.APP_NAME: "stageline",
        labels.APP_INSTANCE: model.name,
        labels.APP_COMPONENT: component,
        labels.APP_PART_OF: "stageline",
        labels.APP_MANAGED_BY: "stageline-operator",
        labels.MODEL: model.name,
    }


def object_metadata(model: PipelineModel, name: str, component: str, **extra_labels: str) -> dict[str, Any]:
    """`metadata` of an object, owned by the model when the model has a uid (a file's model has none)."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": model.namespace,
        "labels": model_labels(model, component) | extra_labels,
    }
    if model.metadata.uid is not None:
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": model.name, "uid": model.metadata.uid}
        metadata["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": True}]
    return metadata
