"""PersistentVolumeClaims that keep a stage's prepared weights across incarnations (`model.cache.claimTemplate`). Pure.

Each stage of each group index has its own claim, used by one pod at a time. So a ReadWriteOnce volume is enough, and
`stageline prepare` may delete files that its pod doesn't need.
"""

from collections.abc import Iterator
from typing import Any, Final

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import cache_claim_name, object_metadata

CLAIM: Final = "PersistentVolumeClaim"


def build_cache_claims(model: PipelineModel, group: int) -> list[dict[str, Any]]:
    """The claims of a group's stages; empty if the model doesn't ask for them."""
    template = model.spec.model.cache.claim_template
    if template is None:
        return []
    chosen = {} if template.storage_class_name is None else {"storageClassName": template.storage_class_name}
    return [
        {
            "apiVersion": "v1",
            "kind": CLAIM,
            "metadata": object_metadata(model, cache_claim_name(model, group, stage), "cache"),
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": template.size}},
                **chosen,
            },
        }
        for stage in range(model.spec.parallelism.pipeline)
    ]


def kept_claims(model: PipelineModel) -> Iterator[str]:
    """Names of claims that are kept while no group uses them. A rollout may have moved the group to another index, or
    the model is suspended or may scale back.
    """
    if model.spec.model.cache.claim_template is None:
        return
    autoscaling = model.spec.autoscaling
    most = max(1, model.spec.replicas, 0 if autoscaling is None else autoscaling.max_replicas)
    for group in range(most + model.spec.rollout.max_surge):
        for stage in range(model.spec.parallelism.pipeline):
            yield cache_claim_name(model, group, stage)
