"""Parses a pod manifest with status into the facts that planning needs, including the loss of its kubelet."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, cast

from stageline_api import labels
from stageline_api.failures import FailureClass
from stageline_operator.planner.objects.stage_pod import ENGINE_CONTAINER, STAGE_CONTAINER
from stageline_operator.planner.observed.container_end import (
    ContainerEnd,
    container_ends,
    container_statuses,
    has_begun,
    is_refused,
    moment,
)
from stageline_operator.planner.types import PodTrouble

IMAGE_TROUBLE: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
"""Kubelet reasons for an image it can't pull. It retries, and these reasons don't return after a successful pull."""
_CONFIG_TROUBLE: Final = "CreateContainerConfigError"
"""A Secret or ConfigMap of a container is missing; the kubelet retries."""
_TAINT_MANAGER: Final = "DeletionByTaintManager"
SILENT_SECONDS: Final = 10.0
OVERDUE_SECONDS: Final = 60.0
_BEING_MADE: Final = frozenset({"ContainerCreating", "PodInitializing"})
_RESTARTED: Final = frozenset({"Always", "OnFailure"})
"""Restart policies of a single container that its kubelet restarts."""

_ENDED_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""The kubelet sets these after all containers of a pod have ended; its devices and ports are then free."""


@dataclass(frozen=True)
class Blocked:
    """Why a pod's containers don't start although none failed. `since` is None if unknown."""

    failure_class: FailureClass
    container: str
    reason: str
    message: str
    since: datetime | None


@dataclass(frozen=True)
class ObservedPod:
    """One stage pod. `note` is a sentence on what it waits for."""

    name: str
    owner: str
    """Uid of the PipelineModel that it was created for; empty if there is none."""
    group: int
    incarnation: int
    stage: int
    revision: str
    node: str
    ready: bool
    deleting: bool
    is_over: bool
    """Whether it is being deleted and none of its processes runs: its kubelet only has to clean up."""
    note: str
    ends: tuple[ContainerEnd, ...]
    placed: bool
    """Whether it has a node."""
    placed_at: datetime | None
    lost: bool
    """Whether its node is lost: the pod counts as ended, although no kubelet reports it."""
    unheard: bool
    """Whether it was ready at its node's last report, and that node is unreachable but does not count as lost."""
    blocked: Blocked | None
    disruption: str
    """What is about to end the pod and why, from its DisruptionTarget condition."""
    refused: bool
    """Whether its kubelet rejected it, which `blocked` explains: none of its containers will run."""
    before_start: str
    """What it does before its stage and engine begin, as a sentence; empty once they have begun."""


def read_pod(
    pod: Mapping[str, Any],
    now: datetime,
    lost_nodes: Collection[str] = (),
    trouble: PodTrouble | None = None,
    unheard_nodes: Collection[str] = (),
) -> ObservedPod:
    """Parse a pod; raises `KeyError` if it lacks Stageline's labels (the observer selects by them).

    `trouble` applies only while the pod waits for its containers.
    """
    metadata, status = pod["metadata"], pod.get("status", {})
    own_labels = metadata["labels"]
    stage = int(own_labels[labels.STAGE])
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    node = pod.get("spec", {}).get("nodeName", "")
    kubelet_says = conditions.get("ContainersReady", {}).get("status")
    scheduled = conditions.get("PodScheduled", {})
    placed = scheduled["status"] == "True" if scheduled else bool(node or status.get("containerStatuses"))
    refused = is_refused(status) and "deletionTimestamp" not in metadata
    return ObservedPod(
        name=metadata["name"],
        owner=next((each["uid"] for each in metadata.get("ownerReferences", []) if each.get("controller")), ""),
        group=int(own_labels[labels.GROUP]),
        incarnation=int(own_labels[labels.INCARNATION]),
        stage=stage,
        revision=own_labels.get(labels.REVISION, ""),
        node=node,
        ready=conditions.get("Ready", {}).get("status") == "True" and not refused,
        deleting="deletionTimestamp" in metadata,
        is_over="deletionTimestamp" in metadata and status.get("phase") in _ENDED_PHASES,
        note=_note(status),
        ends=tuple(container_ends(_without_sidecars(pod), stage, now)),
        placed=placed,
        placed_at=moment(scheduled.get("lastTransitionTime")),
        lost=node in lost_nodes or (status.get("reason") == FailureClass.NODE_LOST and not refused),
        unheard=node in unheard_nodes and kubelet_says == "True",
        blocked=(_refused(status) if refused else None)
        or _unscheduled(scheduled)
        or next(_image_trouble(status), None)
        or next(_config_trouble(status), None)
        or (_not_started(trouble) if trouble is not None and waits_for_containers(pod) else None),
        disruption=_disruption(conditions.get("DisruptionTarget", {})),
        refused=refused,
        before_start=_before_start(pod) if placed else "it has no node yet",
    )


def spec_to_keep(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a pod's spec that this module reads: a cached pod keeps only them."""
    kept: dict[str, Any] = {"nodeName": spec["nodeName"]} if spec.get("nodeName") else {}
    for kind in ("initContainers", "containers"):
        policies = ({"name": each["name"], "restartPolicy": each.get("restartPolicy")} for each in spec.get(kind) or ())
        if restarted := [each for each in policies if each["restartPolicy"] in _RESTARTED]:
            kept[kind] = restarted
    return kept


def _sidecars(pod: Mapping[str, Any]) -> set[str]:
    """Containers that their kubelet restarts one by one."""
    spec = spec_to_keep(pod.get("spec", {}))
    return {each["name"] for kind in ("initContainers", "containers") for each in spec.get(kind, ())}


def _without_sidecars(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod's status without sidecars: their ends are not the stage's."""
    status = pod.get("status", {})
    sidecars = _sidecars(pod)
    if not sidecars:
        return cast(Mapping[str, Any], status)
    kinds = ("initContainerStatuses", "containerStatuses")
    kept = {kind: [each for each in status.get(kind, []) if each["name"] not in sidecars] for kind in kinds}
    return {**status, **kept}


def _before_start(pod: Mapping[str, Any]) -> str:
    """What a scheduled pod does before its stage begins. The status does not tell whether an image is being pulled."""
    status, sidecars = pod.get("status", {}), _sidecars(pod)
    own = [each for each in status.get("containerStatuses", []) if each["name"] in (STAGE_CONTAINER, ENGINE_CONTAINER)]
    if own and all(has_begun(each) for each in own):
        return ""
    for each, _ in container_statuses(status):
        match each.get("state", {}):
            case {"running": running} if each["name"] not in sidecars and each not in own:
                since = f" since {running['startedAt']}" if running.get("startedAt") else ""
                return f"its init container {each['name']} runs{since}"
            case {"waiting": waiting} if waiting.get("reason") not in _BEING_MADE:
                return _waiting_words(each["name"], waiting)
            case {"waiting": _}:
                return f"its container {each['name']} does not exist yet: an image is pulled, or a volume attached"
    return "its kubelet has not started it"


def _waiting_words(name: str, waiting: Mapping[str, Any]) -> str:
    return f"{name}: {waiting.get('reason', '')}: {waiting.get('message', '')}".rstrip(": ")


def _refused(status: Mapping[str, Any]) -> Blocked:
    reason = str(status.get("reason") or "")
    words = str(status.get("message") or "it failed before its containers began, and its kubelet reports no reason")
    message = f"its node rejected it: {reason}: {words}" if reason else words
    return Blocked(FailureClass.UNSCHEDULABLE, "", reason, message, None)


def _unscheduled(scheduled: Mapping[str, Any]) -> Blocked | None:
    if scheduled.get("status") != "False":
        return None
    reason = str(scheduled.get("reason", ""))
    words = str(scheduled.get("message") or reason)
    return Blocked(FailureClass.UNSCHEDULABLE, "", reason, words, moment(scheduled.get("lastTransitionTime")))


def _image_trouble(status: Mapping[str, Any]) -> Iterator[Blocked]:
    for each, _ in container_statuses(status):
        waiting = each.get("state", {}).get("waiting", {})
        if waiting.get("reason") in IMAGE_TROUBLE:
            since = moment(status.get("startTime"))
            words = str(waiting.get("message") or waiting["reason"])
            yield Blocked(FailureClass.IMAGE_PULL, each["name"], waiting["reason"], words, since)


def _config_trouble(status: Mapping[str, Any]) -> Iterator[Blocked]:
    for each, _ in container_statuses(status):
        waiting = each.get("state", {}).get("waiting", {})
        if waiting.get("reason") == _CONFIG_TROUBLE:
            since, words = moment(status.get("startTime")), str(waiting.get("message") or _CONFIG_TROUBLE)
            yield Blocked(FailureClass.NOT_STARTED, each["name"], _CONFIG_TROUBLE, words, since)


def _not_started(trouble: PodTrouble) -> Blocked:
    return Blocked(FailureClass.NOT_STARTED, "", trouble.reason, f"{trouble.reason}: {trouble.message}", trouble.since)


def waits_for_containers(pod: Mapping[str, Any]) -> bool:
    """Whether a scheduled pod has no container yet: its status does not contain the reason."""
    status = pod.get("status", {})
    states = [each.get("state", {}) for each, _ in container_statuses(status)]
    is_bound = bool(pod.get("spec", {}).get("nodeName")) and "deletionTimestamp" not in pod["metadata"]
    is_young = status.get("phase", "Pending") == "Pending"
    return is_bound and is_young and all(state.get("waiting", {}).get("reason") in _BEING_MADE for state in states)


def _disruption(condition: Mapping[str, Any]) -> str:
    if condition.get("status") != "True":
        return ""
    return ": ".join(text for text in (condition.get("reason", ""), condition.get("message", "")) if text)


def _note(status: Mapping[str, Any]) -> str:
    for each, _ in container_statuses(status):
        match each.get("state", {}):
            case {"waiting": waiting} if waiting.get("reason") not in ("PodInitializing", "ContainerCreating"):
                return _waiting_words(each["name"], waiting)
            case {"terminated": {"exitCode": int(code)}} if code != 0:
                return f"{each['name']} exited with status {code}"
            case {"running": _} if not each.get("ready"):
                return f"{each['name']} is starting"
    return ""


def given_up_at(pod: Mapping[str, Any]) -> datetime | None:
    """When the pod's kubelet counts as gone, from the pod alone, for an operator that may not read nodes.

    None while the kubelet seems alive. A kubelet writes `Ready` and `ContainersReady` together, and Stageline's pods
    have no readiness gates. The node controller, for an unreachable node, writes only `Ready`. So a pod that isn't
    ready while its containers are has no kubelet, or a returning one that corrects it within seconds. A live kubelet
    also ends a pod soon after its grace period; if it does not, no process of the pod can disturb a new incarnation.
    """
    since = moment(_condition(pod, "Ready").get("lastTransitionTime")) if is_silent(pod) else None
    # The end of the grace period, not the time of the deletion request.
    ends = moment(pod["metadata"].get("deletionTimestamp"))
    return min(
        (at + timedelta(seconds=wait) for at, wait in ((since, SILENT_SECONDS), (ends, OVERDUE_SECONDS)) if at),
        default=None,
    )


def is_silent(pod: Mapping[str, Any]) -> bool:
    """Whether only the node controller updates the pod; a live kubelet corrects that within seconds."""
    said = (_condition(pod, kind).get("status") for kind in ("Ready", "ContainersReady"))
    return tuple(said) == ("False", "True")


def is_given_up(pod: Mapping[str, Any]) -> bool:
    """Whether the control plane evicted the pod because its node is lost; it does not evict in an outage."""
    condition = _condition(pod, "DisruptionTarget")
    return condition.get("status") == "True" and condition.get("reason") == _TAINT_MANAGER


def _condition(pod: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((each for each in pod.get("status", {}).get("conditions", []) if each["type"] == kind), {})


def next_look_seconds(pods: Sequence[Mapping[str, Any]], now: datetime) -> float | None:
    """Seconds until the first of the pods counts as lost; None if none is about to."""
    left = ((at - now).total_seconds() for pod in pods if (at := given_up_at(pod)) is not None)
    return min((seconds for seconds in left if seconds > 0), default=None)
