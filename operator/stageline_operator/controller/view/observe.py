"""Builds the planner's observed state of one model from the cache. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from stageline_api import labels
from stageline_api.resource import pipeline_model
from stageline_api.resource.life.recorded_status import read_status
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_operator.controller.client.resources import ModelKey, controller_of
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.planner.observed.node_losses import NodeLosses, judge_nodes
from stageline_operator.planner.observed.observed_objects import applied_hashes, owned_by, revision_specs
from stageline_operator.planner.types import ObjectKey, Observed, PodTrouble

_POD_LABELS: Final = (labels.GROUP, labels.STAGE, labels.INCARNATION)


def observe(
    cache: ObjectCache,
    key: ModelKey,
    status: PipelineModelStatus,
    secrets: Iterable[str],
    layers_of_pod: Mapping[str, str],
    trouble_of_pod: Mapping[str, PodTrouble],
    now: datetime,
    watches_nodes: bool = False,
) -> Observed:
    """The observed state of a model. `secrets` are names of Secrets that were created for the model with its uid.

    If nodes aren't watched, none counts as lost here: the cache has no nodes then, but the pods may show a loss.
    """
    model = cache.model(key)
    uid = None if model is None else model["metadata"]["uid"]
    pods: list[Mapping[str, Any]] = []
    objects: dict[ObjectKey, Mapping[str, Any]] = {("Secret", name): {} for name in secrets}
    for identity, manifest in cache.of_model(key):
        if identity.kind == "Pod":
            if is_stage_pod(manifest, key):
                pods.append(manifest)
        elif (controller_of(manifest) or {}).get("uid") == uid and "deletionTimestamp" not in manifest["metadata"]:
            objects[identity.kind, identity.name] = manifest
    names = {pod["metadata"]["name"] for pod in pods}
    losses = node_losses(cache, pods, now) if watches_nodes else NodeLosses()
    return Observed(
        status=status,
        pods=tuple(pods),
        objects=frozenset(objects),
        layers_of_pod={name: layers for name, layers in layers_of_pod.items() if name in names},
        trouble_of_pod={name: trouble for name, trouble in trouble_of_pod.items() if name in names},
        applied_hashes=applied_hashes(objects),
        owned_fields=owned_by(objects),
        revision_specs=revision_specs(each for (kind, _), each in objects.items() if kind == "ConfigMap"),
        lost_nodes=losses.lost,
        unheard_nodes=losses.unheard,
        unheard_why=losses.why,
        sees_nodes=watches_nodes,
    )


def is_stage_pod(manifest: Mapping[str, Any], key: ModelKey) -> bool:
    """Whether a pod with the model's label is a stage, even an orphan or one of a deleted model."""
    own = manifest["metadata"].get("labels") or {}
    if any(not own.get(label, "").isdecimal() for label in _POD_LABELS):
        return False
    owner = controller_of(manifest)
    return owner is None or (owner.get("kind") == pipeline_model.KIND and owner.get("name") == key.name)


def recorded_status(model: Mapping[str, Any]) -> PipelineModelStatus:
    """The readable part of the recorded status. An empty one is safe: incarnations continue above those of the pods."""
    return read_status(model.get("status"))


def node_losses(cache: ObjectCache, pods: Iterable[Mapping[str, Any]], now: datetime) -> NodeLosses:
    """Verdict on the nodes of these pods."""
    asked = {name for pod in pods if (name := pod.get("spec", {}).get("nodeName"))}
    known = cache.taints_of_nodes
    return judge_nodes(asked, known, len(cache.silent_nodes), len(known), now)
