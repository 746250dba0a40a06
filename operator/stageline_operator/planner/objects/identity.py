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
"""Spec fields that don't affect pods: changing them replaces nothing."""


@dataclass(frozen=True)
class GroupIncarnation:
    """One incarnation of one group."""

    group: int
    incarnation: int


FIRST_DEFAULTS: Final[dict[str, Any]] = {"engine.maxNumSeqs": 16, "engine.maxNumBatchedTokens": 512}
"""Original values of defaults that have changed since, by path (`engine.maxNumSeqs`).

The API server stores defaults like values that a user set. A revision therefore omits fields at their original default,
in every later version. Otherwise a new default would restart every model.
"""


def revision_of(model: PipelineModel) -> str:
    """Hash of the pod-shaping spec. Two models with one revision ask for the same pods.

    Original defaults are omitted, so an operator with more fields or other defaults restarts nothing.
    """
    text = json.dumps([shaping_spec(model), model.served_name], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_DIGITS]


def shaping_spec(model: PipelineModel) -> dict[str, Any]:
    """The pod-shaping part of the spec as a user would write it: without original defaults."""
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
    """The pod-shaping part of the spec with all defaults, so that later versions build the same pods."""
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
    """The DNS name in the certificates of all of the model's pods: that of their common Service."""
    return f"{headless_service_name(model)}.{model.namespace}.svc"


def engine_service_name(model: PipelineModel) -> str:
    return f"{model.name}-engine"


def config_map_name(model: PipelineModel, revision: str) -> str:
    """One ConfigMap per revision: a group keeps the config that it was created from."""
    return f"{model.name}-{revision}"


def disruption_budget_name(model: PipelineModel) -> str:
    return model.name


def cache_claim_name(model: PipelineModel, group: int, stage: int) -> str:
    """The same for every incarnation, so that each reuses the files of the one before it."""
    return f"{model.name}-cache-{group}-{stage}"


def incarnation_policy_name(model: PipelineModel, life: GroupIncarnation) -> str:
    return f"{model.name}-{life.group}-{life.incarnation}"


def bus_secret_name(model: PipelineModel) -> str:
    """Secret with the plan bus's shared token.

    The operator may create Secrets but not read them. So the name must differ each time a model is created again: an
    existing Secret with the name then never belongs to a deleted model and to the garbage collector.
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
    """`metadata` of an object, owned by the model if the model has a uid (a model from a file has none)."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": model.namespace,
        "labels": model_labels(model, component) | extra_labels,
    }
    if model.metadata.uid is not None:
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": model.name, "uid": model.metadata.uid}
        metadata["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": True}]
    return metadata
