"""The PodDisruptionBudget of a model: drains of nodes take one stage pod at a time."""

from typing import Any

from stageline_api import labels
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import disruption_budget_name, object_metadata


def build_disruption_budget(model: PipelineModel) -> dict[str, Any]:
    """At most one of all stage pods may be evicted at a time, which costs one group.

    `minAvailable` is a number: a `maxUnavailable` would count the scale of the PipelineModel, which is groups, not
    pods. Pods that aren't ready may always be evicted: a group that doesn't serve must not keep a node from draining.
    """
    pods = model.spec.replicas * model.spec.parallelism.pipeline
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": object_metadata(model, disruption_budget_name(model), "stage"),
        "spec": {
            "minAvailable": pods - 1,
            "selector": {"matchLabels": {labels.MODEL: model.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
