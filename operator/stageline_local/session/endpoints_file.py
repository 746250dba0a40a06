"""Writes the endpoints file when it changes: it lists the groups of the gateway, and whether each accepts requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stageline_api import labels, ports
from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_api.failures import place_of
from stageline_api.resource.life.status import GroupStatus, PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_local.replaced_file import replace_file
from stageline_operator.planner.types import GroupPhase

_DRAINING: Final = frozenset({GroupPhase.REPLACING, GroupPhase.DRAINING})
"""Their pods finish running requests and accept no more."""


def group_endpoints(
    model: PipelineModel, status: PipelineModelStatus, pods: Sequence[Mapping[str, Any]], draining: bool
) -> Endpoints:
    """Endpoints of all groups; a group's engine runs in its stage 0's pod."""
    address_of: dict[tuple[str, str], str] = {}
    for pod in pods:
        own = pod["metadata"]["labels"]
        if own.get(labels.STAGE) == "0":
            address_of[own[labels.GROUP], own[labels.INCARNATION]] = pod["status"].get("podIP", "")
    groups = []
    for group in status.groups:
        address = address_of.get((str(group.index), str(group.incarnation)), "")
        ready = group.phase == GroupPhase.READY and bool(address) and not draining
        groups.append(
            GroupEndpoint(
                model=model.served_name,
                group=group.index,
                incarnation=group.incarnation,
                url=f"http://{address}:{ports.ENGINE_HTTP}" if address else "",
                ready=ready,
                revision=group.revision,
                draining=bool(address) and (draining or group.phase in _DRAINING),
                adapters=tuple(adapter.name for adapter in model.spec.engine.lora_adapters),
                message="" if ready else _why_not(group, status, draining),
            )
        )
    window = {model.served_name: float(model.spec.timeouts.resume_window_seconds)}
    return Endpoints(groups=tuple(groups), resume_window_seconds=window)


def _why_not(group: GroupStatus, status: PipelineModelStatus, draining: bool) -> str:
    if draining:
        return "shutting down"
    failure = next((each for each in status.last_failures if each.group == group.index), None)
    where = "" if failure is None else place_of(failure.stage, failure.rank)
    cause = "" if failure is None else f" after {where} failed: {failure.failure_class}"
    match group.phase:
        case GroupPhase.FAILED:
            return f"down{cause}"
        case GroupPhase.TERMINATING | GroupPhase.BACKING_OFF:
            return f"restarting{cause}"
        case GroupPhase.WAITING:
            return "waiting for nodes"
        case GroupPhase.DRAINING:
            return "being removed"
        case _:
            return f"starting{cause}"


def write_endpoints(path: Path, endpoints: Endpoints) -> bool:
    """Replace the file atomically if its content differs; returns whether it did."""
    text = endpoints.model_dump_json(indent=2) + "\n"
    try:
        if path.read_text(encoding="utf-8") == text:
            return False
    except FileNotFoundError:
        pass
    replace_file(path, text)
    return True
