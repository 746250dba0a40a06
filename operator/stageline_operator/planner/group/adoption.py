"""A group that is not on record but has pods: its entry of the status was lost, or can't be read.

What its pods show is taken for granted, so that a group which runs goes on running, and a rollout takes it in its turn.
Only what is ending anyway, or was made for an earlier life of the model, is replaced.
"""

from collections.abc import Sequence

from stageline_api.resource.life.status import GroupStatus, StageObserved
from stageline_operator.planner.context import Context
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.types import GroupPhase


def adopt(context: Context, index: int, pods: Sequence[ObservedPod]) -> GroupStatus:
    """The group as its pods of the highest incarnation show it; `pods` are all of its pods, at least one."""
    incarnation = max(pod.incarnation for pod in pods)
    own = [pod for pod in pods if pod.incarnation == incarnation]
    found = GroupStatus(index=index, incarnation=incarnation, phase=GroupPhase.REPLACING, since=context.now)
    is_ours = all(pod.owner == (context.model.metadata.uid or "") for pod in own)
    if not is_ours or all(pod.deleting for pod in own):
        return found
    revision = own[0].revision
    model = context.model_at(revision)
    count = max(pod.stage for pod in own) + 1 if model is None else model.spec.parallelism.pipeline
    rows = tuple(StageObserved(index=stage) for stage in range(count))
    # One of which nothing serves yet may have been cut short while its pods were made: then the rest is made.
    phase = GroupPhase.STARTING if any(pod.ready or pod.unheard for pod in own) else GroupPhase.CREATING
    return found.model_copy(update={"revision": revision, "phase": phase, "stages": rows})
