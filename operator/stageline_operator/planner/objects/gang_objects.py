"""Objects and labels that make an incarnation's pods one gang for a gang scheduler (`spec.placement.gang`). Pure.

Volcano, KAI and Kubernetes read an object of their own kind. Each incarnation has one, with as many members as the
group has stages, and its pods refer to it. Kueue has no such object: it counts pods with a common label up to a number.
Each incarnation has its own gang, so that ending pods never count for starting ones.
"""

from typing import Any, Final

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.placing.gang import (
    KAI_GROUP_ANNOTATION,
    KAI_NO_GROUPER_ANNOTATION,
    KUEUE_COUNT_ANNOTATION,
    KUEUE_GROUP_LABEL,
    KUEUE_QUEUE_LABEL,
    SCHEDULER_NAMES,
    VOLCANO_GROUP_ANNOTATION,
)
from stageline_operator.planner.objects.identity import GroupIncarnation, object_metadata
from stageline_operator.planner.types import NATIVE_GROUP, POD_GROUP, kind_of

API_VERSIONS: Final = {
    "volcano": "scheduling.volcano.sh/v1beta1",
    "kai": "scheduling.run.ai/v2alpha2",
    "kubernetes": f"{NATIVE_GROUP}/v1beta1",
}
GANG_OBJECT_KINDS: Final = tuple(kind_of({"kind": POD_GROUP, "apiVersion": api}) for api in API_VERSIONS.values())
"""All gang object kinds, as `kind_of` returns them."""


def gang_name(model: PipelineModel, life: GroupIncarnation) -> str:
    """Name of an incarnation's gang, for every scheduler."""
    return f"{model.name}-{life.group}-{life.incarnation}"


def build_pod_group(model: PipelineModel, life: GroupIncarnation) -> dict[str, Any] | None:
    """The gang object of an incarnation; None if its scheduler needs none."""
    gang = model.spec.placement.gang
    if gang is None or gang.scheduler == "kueue":
        return None
    metadata = object_metadata(model, gang_name(model, life), "gang")
    members, priority = model.spec.parallelism.pipeline, model.spec.template.priority_class_name
    wanted: dict[str, Any] = {"minMember": members, "queue": gang.queue, "priorityClassName": priority}
    if gang.scheduler == "kubernetes":
        # Preempt the group as a whole: a pipeline without one of its stages can't serve.
        wanted = {
            "schedulingPolicy": {"gang": {"minCount": members}},
            "disruptionMode": {"all": {}},
            "priorityClassName": priority,
        }
    return {
        "apiVersion": API_VERSIONS[gang.scheduler],
        "kind": POD_GROUP,
        "metadata": metadata,
        "spec": {name: value for name, value in wanted.items() if value is not None},
    }


def gang_reference(model: PipelineModel, life: GroupIncarnation) -> dict[str, Any]:
    """Pod spec fields by which a pod joins its incarnation's gang; most schedulers read the metadata instead."""
    gang = model.spec.placement.gang
    native = gang is not None and gang.scheduler == "kubernetes"
    return {"schedulingGroup": {"podGroupName": gang_name(model, life)}} if native else {}


def gang_metadata(model: PipelineModel, life: GroupIncarnation) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations by which a pod joins its incarnation's gang."""
    gang, name = model.spec.placement.gang, gang_name(model, life)
    if gang is None:
        return {}, {}
    match gang.scheduler:
        case "volcano":
            return {}, {VOLCANO_GROUP_ANNOTATION: name}
        case "kai":
            # KAI's grouper would put the pods of all groups into one gang, because they have one owner.
            return {}, {KAI_GROUP_ANNOTATION: name, KAI_NO_GROUPER_ANNOTATION: "true"}
        case "kueue":
            labels = {KUEUE_QUEUE_LABEL: str(gang.queue), KUEUE_GROUP_LABEL: name}
            return labels, {KUEUE_COUNT_ANNOTATION: str(model.spec.parallelism.pipeline)}
        case "kubernetes":
            return {}, {}


def scheduler_name(model: PipelineModel) -> str | None:
    """`schedulerName` of the pods; None: the cluster's default."""
    gang, given = model.spec.placement.gang, model.spec.template.scheduler_name
    return given if gang is None else SCHEDULER_NAMES.get(gang.scheduler, given)
