"""Claims that keep a stage's prepared weights over the incarnations of its group (`model.cache.claimTemplate`).

One for each stage of each group's index, never shared: its pod is the only one that uses it at any time, so a volume
that one node may write is enough, and `stageline prepare` may remove from it what its pod doesn't ask for. Pure.
"""

from collections.abc import Iterator
from typing import Any, Final

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import cache_claim_name, object_metadata

CLAIM: Final = "PersistentVolumeClaim"


def build_cache_claims(model: PipelineModel, group: int) -> list[dict[str, Any]]:
    """The claims of a group's stages; none where the model doesn't ask for them."""
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
    """Names of claims that stay although no group has them now: it may have been rolled out to another index, be
    suspended, or be scaled back to where it was.
    """
    if model.spec.model.cache.claim_template is None:
        return
    autoscaling = model.spec.autoscaling
    most = max(1, model.spec.replicas, 0 if autoscaling is None else autoscaling.max_replicas)
    for group in range(most + model.spec.rollout.max_surge):
        for stage in range(model.spec.parallelism.pipeline):
            yield cache_claim_name(model, group, stage)
