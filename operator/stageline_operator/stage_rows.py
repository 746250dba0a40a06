"""The rows of a group's status: one for each stage, in pipeline order."""

from collections.abc import Sequence

from stageline_api.spec_status import GroupStatus, StageObserved
from stageline_operator.observed_pod import ObservedPod
from stageline_operator.plan import Context


def stage_rows(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> tuple[StageObserved, ...]:
    """Rows of the current incarnation; a stage without a pod has a row that says so."""
    pod_of = {pod.stage: pod for pod in pods if pod.incarnation == status.incarnation}
    return tuple(_row(context, stage, pod_of.get(stage)) for stage in range(context.model.spec.parallelism.pipeline))


def _row(context: Context, stage: int, pod: ObservedPod | None) -> StageObserved:
    if pod is None:
        return StageObserved(index=stage, message="no pod")
    given = context.model.spec.stages[stage].layers if context.model.spec.stages else None
    return StageObserved(
        index=stage,
        pod=pod.name,
        node=pod.node,
        layers=context.observed.layers_of_pod.get(pod.name, given or ""),
        ready=pod.ready,
        message="ending" if pod.deleting else pod.note,
    )
