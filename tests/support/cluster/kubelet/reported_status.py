"""From the process node's status of a pod to the patch that a kubelet sends. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from stageline_local.node.pod_status import timestamp

_NODE_OWNS: Final = ("Initialized", "ContainersReady", "Ready")
"""`PodScheduled` is the scheduler's."""


def status_patch(pod: Mapping[str, Any], status: Mapping[str, Any], node_address: str, now: datetime) -> dict[str, Any]:
    """Strategic merge patch of `pod`'s status subresource; names the pod's uid, so it can't hit a successor."""
    previous = {each["type"]: each for each in pod.get("status", {}).get("conditions", [])}
    conditions = [_condition(each, previous, now) for each in status["conditions"] if each["type"] in _NODE_OWNS]
    reported = {**status, "hostIP": node_address, "hostIPs": [{"ip": node_address}], "conditions": conditions}
    return {"metadata": {"uid": pod["metadata"]["uid"]}, "status": reported}


def _condition(condition: Mapping[str, Any], previous: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    before = previous.get(condition["type"], {})
    unchanged = before.get("status") == condition["status"] and "lastTransitionTime" in before
    since = before["lastTransitionTime"] if unchanged else timestamp(now)
    # A null takes away what an earlier patch said.
    return {"reason": None, "message": None, **condition, "lastTransitionTime": since}


def failed_patch(pod: Mapping[str, Any], reason: str, message: str) -> dict[str, Any]:
    """The pod failed as a whole, before any container ran."""
    return {
        "metadata": {"uid": pod["metadata"]["uid"]},
        "status": {"phase": "Failed", "reason": reason, "message": message},
    }


def lost_patch(pod: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """The pod ran under an earlier life of this node, which ended; how its containers ended is not known."""
    words = "the node ended and was started again; the container did not outlive it"

    def _lost(each: Mapping[str, Any]) -> dict[str, Any]:
        if "terminated" in each["state"]:
            return dict(each)
        ended = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": words, "finishedAt": timestamp(now)}
        return {**each, "state": {"terminated": ended}, "ready": False, "started": False}

    status = pod.get("status", {})
    fields = ("initContainerStatuses", "containerStatuses")
    return {
        "metadata": {"uid": pod["metadata"]["uid"]},
        "status": {
            "phase": "Failed",
            **{field: [_lost(each) for each in status.get(field, [])] for field in fields if status.get(field)},
            "conditions": [
                {"type": kind, "status": "False", "reason": "PodFailed", "lastTransitionTime": timestamp(now)}
                for kind in ("ContainersReady", "Ready")
            ],
        },
    }
