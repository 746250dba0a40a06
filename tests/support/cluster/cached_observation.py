"""What the operator's process would plan from: each manifest as its own cache keeps it.

A planner that is given whole manifests may read what the cache has dropped, and no test would notice. So whoever tests
the planner observes through here.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stageline_api.resource import pipeline_model
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.controller.client.resources import NODE, SECRET, ModelKey
from stageline_operator.controller.settings import FIELD_MANAGER
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import observe
from stageline_operator.planner.observed.node_losses import Taints
from stageline_operator.planner.types import ObjectKey, Observed, PodTrouble

Manifest = Mapping[str, Any]


def as_served(manifest: Manifest, namespace: str, version: int, owned: Manifest | None = None) -> dict[str, Any]:
    """The manifest with what an API server adds to it. `owned` are the fields that the operator still owns."""
    metadata: dict[str, Any] = {"uid": f"uid-{manifest['metadata']['name']}", "namespace": namespace}
    metadata |= manifest["metadata"]
    metadata["resourceVersion"] = str(version)
    if owned is not None:
        entry = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": owned}
        metadata["managedFields"] = [entry]
    return {**manifest, "metadata": metadata}


def observe_through_cache(
    model: PipelineModel,
    objects: Mapping[ObjectKey, Manifest],
    status: PipelineModelStatus,
    now: datetime,
    *,
    owned: Mapping[ObjectKey, Manifest] | None = None,
    troubles: Mapping[str, PodTrouble] | None = None,
    taints_of_nodes: Mapping[str, Taints] | None = None,
) -> Observed:
    """What is observed of a model of which the API server has `objects`; None: the operator may not look at nodes."""
    cache, key = ObjectCache(), ModelKey(model.namespace, model.name)
    cache.put(pipeline_model.KIND, as_served(model.to_manifest(), key.namespace, 1))
    watched = ((each, manifest) for each, manifest in objects.items() if each[0] != SECRET.kind)
    for version, (each, manifest) in enumerate(watched, 2):
        cache.put(each[0], as_served(manifest, key.namespace, version, (owned or {}).get(each)))
    for name, taints in (taints_of_nodes or {}).items():
        cache.put(NODE.kind, {"metadata": {"name": name, "resourceVersion": "1"}, "spec": {"taints": taints}})
    secrets = [name for kind, name in objects if kind == SECRET.kind]
    return observe(cache, key, status, secrets, {}, troubles or {}, now, taints_of_nodes is not None)
