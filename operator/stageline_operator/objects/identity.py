"""Names, labels, owners and revisions of the objects that belong to a PipelineModel."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from stageline_api import labels
from stageline_api.pipeline_model import API_VERSION, KIND, PipelineModel

_REVISION_DIGITS: Final = 10
_NOT_IN_PODS: Final = ("replicas", "restart")
"""Spec fields that no pod is made from, so changing them replaces nothing."""


@dataclass(frozen=True)
class GroupIncarnation:
    """One life of one copy of the pipeline."""

    group: int
    incarnation: int


def revision_of(model: PipelineModel, default_image: str) -> str:
    """Hash of everything pods are made from; two models with one revision make the same pods."""
    spec = model.to_manifest()["spec"]
    shaping = {name: value for name, value in spec.items() if name not in _NOT_IN_PODS}
    text = json.dumps([shaping, model.served_name, default_image], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_DIGITS]


def pod_name(model: PipelineModel, life: GroupIncarnation, stage: int) -> str:
    """`<model>-<group>-<incarnation>-<stage>`: the stable axis before the ephemeral one."""
    return f"{model.name}-{life.group}-{life.incarnation}-{stage}"


def headless_service_name(model: PipelineModel) -> str:
    """Name under which stages find each other."""
    return f"{model.name}-stages"


def engine_service_name(model: PipelineModel) -> str:
    """Name of the service in front of the engines."""
    return f"{model.name}-engine"


def config_map_name(model: PipelineModel, revision: str) -> str:
    """One ConfigMap for each revision: a group keeps reading the config it was made from."""
    return f"{model.name}-{revision}"


def bus_secret_name(model: PipelineModel) -> str:
    """Secret with the plan bus's shared token."""
    return f"{model.name}-bus"


def model_labels(model: PipelineModel, component: str) -> dict[str, str]:
    """Labels of every object of the model."""
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
