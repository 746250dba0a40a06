"""The output of `stageline up`: one row per stage from status, pods and readings, and lines on events. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stageline_api.conditions import ConditionType, Reason
from stageline_api.failures import ExitCode
from stageline_api.health import Phase, StageStatus
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_local.monitoring.options import MonitorOptions
from stageline_local.node.quantities import format_bytes
from stageline_local.session.stage_polling import Readings
from stageline_operator.planner.types import GroupPhase

NEVER_STARTS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "ErrImagePull"})
"""The kubelet's waiting reasons that never end on a single machine."""


@dataclass(frozen=True)
class StageRow:
    """One stage. `progress` is between 0 and 1 while weights load."""

    group: int
    stage: int
    phase: str
    layers: str = ""
    progress: float | None = None
    memory: str = ""
    message: str = ""

    @property
    def milestone(self) -> tuple[object, ...]:
        """The values that must change before a new plain line is printed: progress counts in quarters."""
        quarter = None if self.progress is None else int(self.progress * 4)
        return (self.group, self.stage, self.phase, self.layers, quarter, self.message)


_WITHOUT_STAGES: Final = (GroupPhase.TERMINATING, GroupPhase.BACKING_OFF, GroupPhase.FAILED, GroupPhase.WAITING)
_SHOWN_AS: Final[Mapping[str, str]] = {
    GroupPhase.BACKING_OFF: "Waiting to restart",
    GroupPhase.TERMINATING: "Ending",
    GroupPhase.WAITING: "Waiting for room",
}


def stage_rows(
    status: PipelineModelStatus,
    pods: Sequence[Mapping[str, Any]],
    readings: Readings,
    prepare_notes: Mapping[str, str],
) -> list[StageRow]:
    """Rows of all groups. `prepare_notes` holds the latest line of each pod's `prepare`, by pod name."""
    pod_of = {pod["metadata"]["name"]: pod for pod in pods}
    rows = []
    for group in status.groups:
        for observed in group.stages:
            pod = pod_of.get(observed.pod)
            if pod is None or group.phase in _WITHOUT_STAGES:
                rows.append(StageRow(group.index, observed.index, _group_phase(group.phase)))
            else:
                spoken = readings.stages.get(observed.pod)
                note = prepare_notes.get(observed.pod, "")
                rows.append(_row(group.index, observed.index, pod, spoken, observed.message, note))
    return rows


def _group_phase(phase: str) -> str:
    return _SHOWN_AS.get(phase, phase)


def _row(
    group: int, stage: int, pod: Mapping[str, Any], spoken: StageStatus | None, message: str, note: str
) -> StageRow:
    if is_preparing(pod):
        return StageRow(group, stage, "Preparing", message=note)
    if spoken is None:
        return StageRow(group, stage, "Starting", message="" if message.endswith("is starting") else message)
    is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
    loading = spoken.phase is Phase.LOADING and spoken.total_bytes > 0 and not is_ready
    return StageRow(
        group,
        stage,
        "Ready" if is_ready else ("Warming" if spoken.phase is Phase.READY else spoken.phase.value),
        layers=f"{spoken.layers.first}-{spoken.layers.last}" if spoken.layers is not None else "",
        progress=spoken.loaded_bytes / spoken.total_bytes if loading else None,
        memory=format_bytes(spoken.memory_bytes) if spoken.memory_bytes else "",
        message=spoken.message if not is_ready else "",
    )


def is_preparing(pod: Mapping[str, Any]) -> bool:
    """Whether an init container of the pod is running."""
    return any("running" in each["state"] for each in pod["status"].get("initContainerStatuses", []))


def unstartable_message(pods: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a container can never start on this machine: no other node and no waiting provides what it lacks.
    Else None.
    """
    for pod in pods:
        # A pod that is being deleted may lack objects that were deleted before it.
        reasons = NEVER_STARTS - ({"CreateContainerConfigError"} if "deletionTimestamp" in pod["metadata"] else set())
        for each in (*pod["status"].get("initContainerStatuses", []), *pod["status"].get("containerStatuses", [])):
            match each["state"]:
                case {"waiting": {"reason": str(reason), "message": str(message)}} if reason in reasons:
                    return f"container {each['name']} of pod {pod['metadata']['name']} can't start: {reason}: {message}"
                case _:
                    pass
    return None


def unschedulable_message(pods: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a pod can't be scheduled on this machine; None if every pod is."""
    for pod in pods:
        for condition in pod["status"].get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False" and condition.get("message"):
                return str(condition["message"])
    return None


def restart_lines(status: PipelineModelStatus) -> list[str]:
    return [
        f"group {group.index} restarts at {group.backoff_until.astimezone():%H:%M:%S} "
        f"(restart {len(group.restarts) + 1} in the window)"
        for group in status.groups
        if group.phase == GroupPhase.TERMINATING and group.backoff_until is not None
    ]


def permanent_failure(status: PipelineModelStatus) -> tuple[str, int] | None:
    """Sentence and exit status if every group is permanently down; None otherwise."""
    conditions = {condition.type: condition for condition in status.conditions}
    degraded = conditions.get(ConditionType.DEGRADED)
    if degraded is None or degraded.status != "True":
        return None
    if any(group.phase != GroupPhase.FAILED for group in status.groups):
        return None
    is_bad = degraded.reason == Reason.BAD_CONFIGURATION
    return degraded.message, int(ExitCode.BAD_CONFIG if is_bad else ExitCode.INTERNAL)


def ready_lines(url: str, served_name: str, name: str) -> list[str]:
    """Commands for a ready endpoint, to copy."""
    body = f'{{"model": "{served_name}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
    return [
        "",
        f"{served_name} is ready at {url}/v1",
        "",
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        "",
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{url}/v1", api_key="none")',
        f'  reply = client.chat.completions.create(model="{served_name}", '
        'messages=[{"role": "user", "content": "Hello!"}])',
        "  print(reply.choices[0].message.content)",
        "",
        f"Stop it with Ctrl-C, or from elsewhere with: stageline down {name}",
    ]


def monitor_lines(options: MonitorOptions | None) -> list[str]:
    """Where to view the boards and Prometheus."""
    if options is None:
        return []
    lines = [f"Boards and alerts: {options.boards_url} (Prometheus: {options.prometheus_url})"]
    if options.alert_speed != 1:
        lines.append(f"This is a drill: alerts fire after 1/{options.alert_speed:g} of their usual time")
    return lines
