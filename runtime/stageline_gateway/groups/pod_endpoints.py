"""Groups as a cluster's objects show them: the pods of stages 0, and the PipelineModels they belong to. Pure.

A group's engine runs in the pod of its stage 0, which is Ready only when all stages are; a pod that is being deleted
drains. Everything is read from labels and status, nothing from names.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from stageline_api import labels, ports
from stageline_api.endpoints import Endpoints, GroupEndpoint

STAGE_0_SELECTOR: Final = f"{labels.STAGE}=0,{labels.MODEL}"

Manifest = Mapping[str, Any]


def check_pod(pod: Manifest) -> None:
    """Raise whatever `endpoints_of` would for this pod."""
    if _is_numbered(pod):
        _group(pod, "", ())


def check_model(model: Manifest) -> None:
    """Raise whatever `endpoints_of` would for this PipelineModel."""
    endpoints_of((), (model,))


def endpoints_of(pods: Iterable[Manifest], models: Collection[Manifest]) -> Endpoints:
    """Endpoints of one namespace. A pod without its PipelineModel serves nothing."""
    served_names = {model["metadata"]["name"]: _served_name(model) for model in models}
    adapters = {model["metadata"]["name"]: _adapters(model) for model in models}
    groups = [
        _group(pod, served_names[name], adapters[name])
        for pod in pods
        if (name := _labels(pod).get(labels.MODEL)) in served_names and _is_numbered(pod)
    ]
    groups.sort(key=lambda group: (group.model, group.group, group.incarnation))
    names = tuple(sorted(set(served_names.values())))
    return Endpoints(
        groups=tuple(groups),
        models=names,
        adapters=_adapters_by_name(models),
        suspended=_all_of(models, _is_suspended),
        scaled_to_zero=_all_of(models, _is_scaled_to_zero),
        resume_window_seconds=_resume_windows(models),
    )


def _served_name(model: Manifest) -> str:
    return str(model.get("spec", {}).get("model", {}).get("servedName") or model["metadata"]["name"])


def _adapters(model: Manifest) -> tuple[str, ...]:
    listed = (model.get("spec", {}).get("engine") or {}).get("loraAdapters") or ()
    return tuple(str(adapter["name"]) for adapter in listed)


def _adapters_by_name(models: Iterable[Manifest]) -> dict[str, tuple[str, ...]]:
    """Of PipelineModels that share a served name, all together; a name without any is left out."""
    found: dict[str, tuple[str, ...]] = {}
    for model in models:
        if listed := _adapters(model):
            name = _served_name(model)
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *listed)))
    return found


def _all_of(models: Iterable[Manifest], holds: Callable[[Mapping[str, Any]], bool]) -> tuple[str, ...]:
    """Served names for which it holds of every PipelineModel's spec: another one may get a group at any time."""
    found: dict[str, bool] = {}
    for model in models:
        name = _served_name(model)
        found[name] = holds(model.get("spec", {})) and found.get(name, True)
    return tuple(sorted(name for name, holds_of_all in found.items() if holds_of_all))


def _is_suspended(spec: Mapping[str, Any]) -> bool:
    return spec.get("suspend") is True


def _is_scaled_to_zero(spec: Mapping[str, Any]) -> bool:
    return spec.get("replicas") == 0 and not _is_suspended(spec)


def _resume_windows(models: Iterable[Manifest]) -> dict[str, float]:
    """By served name; of PipelineModels that share one, the longest. A window that is no number is left out."""
    windows: dict[str, float] = {}
    for model in models:
        seconds = (model.get("spec", {}).get("timeouts") or {}).get("resumeWindowSeconds")
        if isinstance(seconds, int | float):
            name = _served_name(model)
            windows[name] = max(float(seconds), windows.get(name, 0.0))
    return windows


def _labels(pod: Manifest) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _is_numbered(pod: Manifest) -> bool:
    return all(_labels(pod).get(key, "").isdecimal() for key in (labels.GROUP, labels.INCARNATION))


def _group(pod: Manifest, model: str, adapters: tuple[str, ...]) -> GroupEndpoint:
    own, status = _labels(pod), pod.get("status") or {}
    address = status.get("podIP", "")
    draining = "deletionTimestamp" in pod["metadata"]
    # Of the pod, not of the model: groups of two revisions may differ.
    tls_name = (pod["metadata"].get("annotations") or {}).get(labels.TLS_NAME, "")
    scheme = "https" if tls_name else "http"
    ready = bool(address) and not draining and _condition(status, "Ready").get("status") == "True"
    return GroupEndpoint(
        model=model,
        group=int(own[labels.GROUP]),
        incarnation=int(own[labels.INCARNATION]),
        url=f"{scheme}://{f'[{address}]' if ':' in address else address}:{ports.ENGINE_HTTP}" if address else "",
        tls_name=tls_name,
        ready=ready,
        revision=own.get(labels.REVISION, ""),
        draining=draining and bool(address),
        adapters=adapters,
        message="" if ready else _why_not(status, draining),
    )


def _condition(status: Manifest, kind: str) -> Manifest:
    return next((each for each in status.get("conditions") or () if each.get("type") == kind), {})


def _why_not(status: Manifest, draining: bool) -> str:
    if draining:
        return "draining"
    if _condition(status, "PodScheduled").get("status") == "False":
        # Clients read this, so it omits the scheduler's message, which describes the cluster's nodes.
        return "waiting for a node"
    return (
        "starting" if status.get("phase") in ("Pending", "Running", None) else f"its pod has {status['phase'].lower()}"
    )
