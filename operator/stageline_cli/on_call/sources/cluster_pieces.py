"""A cluster's objects about a model besides its PipelineModel and pods: events, logs, ConfigMaps, nodes, the operator.

Secrets are never read. If the API server refuses a request, the piece contains the reason.
"""

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final

from stageline_api import labels, ports
from stageline_cli.on_call.sources.source import MAX_LOG_BYTES, Manifest, ModelObjects, Piece, whole_lines
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.reader import ApiServer

_COMPONENTS: Final = f"{labels.APP_NAME}=stageline,{labels.APP_COMPONENT} in (operator, gateway)"
_LAST_LINES: Final = "20000"


def cluster_pieces(api: ApiServer, model: ModelObjects, now: datetime) -> Iterator[Piece]:
    """All of them, each requested when it is iterated."""
    here = f"/api/v1/namespaces/{model.namespace}"
    yield _read("versions/kubernetes.yaml", lambda: api.get_json("/version"))
    yield _read("events.yaml", lambda: {"items": _events(api, model), "readAt": now.isoformat()})
    yield from _objects(api, "configmap", f"{here}/configmaps", f"{labels.MODEL}={model.name}")
    yield from _objects(api, "service", f"{here}/services", f"{labels.MODEL}={model.name}")
    yield from _nodes(api, model)
    for pod in model.pods:
        yield from _logs(api, pod, "logs")
    yield from _components(api)


def _events(api: ApiServer, model: ModelObjects) -> list[dict[str, Any]]:
    """Events of the model and its pods, including deleted pods: their names are all that is left of them."""
    pod_name = re.compile(rf"{re.escape(model.name)}-\d+-\d+-\d+")
    found = []
    for event in api.get_json(f"/api/v1/namespaces/{model.namespace}/events")["items"]:
        about = event.get("involvedObject", {})
        name = about.get("name", "")
        is_own = name == model.name if about.get("kind") == "PipelineModel" else bool(pod_name.fullmatch(name))
        if is_own:
            event.get("metadata", {}).pop("managedFields", None)
            found.append(event)
    return sorted(found, key=_moment)


def _moment(event: dict[str, Any]) -> str:
    """When an event was last seen; RFC 3339 in UTC sorts as text."""
    series = event.get("series") or {}
    fields = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(each) for each in fields if each), "")


def _objects(api: ApiServer, kind: str, path: str, selector: str) -> Iterator[Piece]:
    try:
        for each in api.get_json(path, labelSelector=selector)["items"]:
            yield Piece(f"objects/{kind}-{each['metadata']['name']}.yaml", document=each)
    except ApiError as error:
        yield Piece(f"objects/{kind}", missing=str(error))


def _nodes(api: ApiServer, model: ModelObjects) -> Iterator[Piece]:
    for name in sorted({str(pod["spec"]["nodeName"]) for pod in model.pods if pod["spec"].get("nodeName")}):
        yield _read(f"nodes/{name}.yaml", lambda name=name: _node(api, name))  # type: ignore[misc]


def _node(api: ApiServer, name: str) -> dict[str, Any]:
    node = api.get_json(f"/api/v1/nodes/{name}")
    kept = ("conditions", "allocatable", "capacity", "nodeInfo")
    status = {field: node.get("status", {}).get(field) for field in kept}
    metadata = {"name": name, "labels": node["metadata"].get("labels", {})}
    return {"metadata": metadata, "spec": {"taints": node["spec"].get("taints", [])}, "status": status}


def _components(api: ApiServer) -> Iterator[Piece]:
    """Pods and logs of operator and gateway, in any namespace."""
    try:
        pods = api.get_json("/api/v1/pods", labelSelector=_COMPONENTS)["items"]
    except ApiError as error:
        yield Piece("components", missing=f"pods of the operator and the gateway: {error}")
        return
    for pod in pods:
        yield Piece(f"components/{pod['metadata']['name']}.yaml", document=pod)
        yield from _logs(api, pod, "components/logs")
        if pod["metadata"].get("labels", {}).get(labels.APP_COMPONENT) == "operator":
            yield _operator_metrics(api, pod)


def _operator_metrics(api: ApiServer, pod: Manifest) -> Piece:
    metadata = pod["metadata"]
    name, path = metadata["name"], f"metrics/{metadata['name']}.prom"
    page = f"/api/v1/namespaces/{metadata['namespace']}/pods/{name}:{ports.OPERATOR_METRICS}/proxy/metrics"
    try:
        return Piece(path, api.get(page).decode(errors="replace"))
    except ApiError as error:
        return Piece(path, missing=str(error))


def _logs(api: ApiServer, pod: Manifest, folder: str) -> Iterator[Piece]:
    """Current logs of all containers, and those from before a restart."""
    metadata, status = pod["metadata"], pod.get("status", {})
    base = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
    for each in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        name = f"{folder}/{metadata['name']}/{each['name']}"
        if "waiting" not in each.get("state", {}):
            yield _log(api, base, each["name"], f"{name}.log", {})
        if each.get("restartCount", 0):
            yield _log(api, base, each["name"], f"{name}.previous.log", {"previous": "true"})


def _log(api: ApiServer, path: str, container: str, name: str, query: dict[str, str]) -> Piece:
    try:
        content = api.get(path, {"container": container, "timestamps": "true", "tailLines": _LAST_LINES} | query)
    except ApiError as error:
        return Piece(name, missing=str(error))
    return Piece(name, whole_lines(content[-MAX_LOG_BYTES:], is_cut=len(content) > MAX_LOG_BYTES))


def _read(path: str, read: Callable[[], Any]) -> Piece:
    try:
        return Piece(path, document=read())
    except ApiError as error:
        return Piece(path, missing=str(error))
