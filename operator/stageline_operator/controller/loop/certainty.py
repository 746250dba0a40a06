"""Which steps may rest on the cache, and which must be planned again from the cluster as it is now. Pure.

A watch may lag. Making what is missing is safe on an old view, because names are fixed: it exists already. Taking away
is not: a pod that only this operator has not heard of yet would look lost, and its healthy group would be replaced.
"""

from stageline_api.resource.status import PipelineModelStatus
from stageline_operator.planner.types import Plan


def needs_fresh_view(step: Plan, before: PipelineModelStatus) -> bool:
    """Whether the step deletes something, records a failure, or begins another life of a group on record."""
    if step.delete or step.status.last_failures != before.last_failures:
        return True
    return begins_another_life(step, before)


def begins_another_life(step: Plan, before: PipelineModelStatus) -> bool:
    """Whether a group on record gets another incarnation."""
    incarnations = {group.index: group.incarnation for group in before.groups}
    return any(incarnations.get(group.index, group.incarnation) != group.incarnation for group in step.status.groups)
