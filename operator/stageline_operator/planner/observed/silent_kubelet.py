"""When a pod's kubelet counts as gone, told from the pod alone: for an operator that may not look at nodes. Pure.

A kubelet writes `Ready` and `ContainersReady` together, and Stageline's pods have no readiness gates. The node
controller, which gives a silent kubelet up, writes `Ready` alone. So a pod that isn't ready while its containers are
has no kubelet, unless one comes back and puts it right within seconds. And a kubelet that lives ends a pod soon after
its grace; where that does not come nobody is there to do it, and nothing is risked: no other incarnation meets it.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from stageline_operator.planner.observed.container_end import moment

SILENT_SECONDS: Final = 10.0
OVERDUE_SECONDS: Final = 60.0


def given_up_at(pod: Mapping[str, Any]) -> datetime | None:
    """From when on the pod counts as lost; None while its kubelet seems to live."""
    conditions = {each["type"]: each for each in pod.get("status", {}).get("conditions", [])}
    ready, containers = conditions.get("Ready", {}), conditions.get("ContainersReady", {})
    is_silent = (ready.get("status"), containers.get("status")) == ("False", "True")
    since = moment(ready.get("lastTransitionTime")) if is_silent else None
    # The time at which its grace ends, not when the deletion was asked for.
    ends = moment(pod["metadata"].get("deletionTimestamp"))
    return min(
        (at + timedelta(seconds=wait) for at, wait in ((since, SILENT_SECONDS), (ends, OVERDUE_SECONDS)) if at),
        default=None,
    )


def next_look_seconds(pods: Sequence[Mapping[str, Any]], now: datetime) -> float | None:
    """Until the first of the pods will count as lost; None when none is about to."""
    left = ((at - now).total_seconds() for pod in pods if (at := given_up_at(pod)) is not None)
    return min((seconds for seconds in left if seconds > 0), default=None)
