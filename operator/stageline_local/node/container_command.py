"""Converts a container's manifest to the command line, environment and files of a local process, as the kubelet does.

Environment: literals, references and `$(VAR)` expansion. Pod names under headless services become addresses.
"""

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stageline_local.node.container import ContainerCommand
from stageline_local.node.images import LocalImages
from stageline_local.node.mounts import MissingObjectError, ObjectLookup, PathRewriter, project_objects, realise_mounts

_DEFAULT_TERMINATION_PATH: Final = "/dev/termination-log"


@dataclass(frozen=True)
class ContainerSetting:
    """Settings shared by all containers of a node. `addresses` returns pod IPs by
    `<hostname>.<subdomain>.<namespace>`.
    """

    pods_dir: Path
    logs_dir: Path
    objects: ObjectLookup
    images: LocalImages
    addresses: Callable[[], Mapping[str, str]]


def build_command(
    pod: Mapping[str, Any], container: Mapping[str, Any], address: str, setting: ContainerSetting
) -> ContainerCommand:
    """Resolve everything that a container needs; raises `MissingObjectError` for an object that does not exist yet."""
    name, directory = container["name"], pod_directory_name(pod)
    pod_dir = setting.pods_dir / directory
    termination_file = pod_dir / "termination" / name
    local_path_of = realise_mounts(pod, container, pod_dir)
    local_path_of[container.get("terminationMessagePath", _DEFAULT_TERMINATION_PATH)] = termination_file
    rewriter = PathRewriter(local_path_of)
    addresses = setting.addresses()
    given = container_env(pod, container, address, setting.objects, addresses, rewriter)
    project_objects(pod, container, pod_dir, setting.objects, rewriter)
    words = [*container["command"], *container.get("args", [])]
    argv = tuple(rewriter.rewrite(resolve_service_names(expand(word, given), addresses)) for word in words)
    working_dir = container.get("workingDir")
    return ContainerCommand(
        argv=argv,
        env=dict(setting.images.env) | given,
        working_dir=Path(rewriter.rewrite(working_dir)) if working_dir else pod_dir,
        log_file=setting.logs_dir / directory / f"{name}.log",
        termination_file=termination_file,
        falls_back_to_logs=container.get("terminationMessagePolicy") == "FallbackToLogsOnError",
    )


def pod_directory_name(pod: Mapping[str, Any]) -> str:
    """Directory of a pod's files and logs: its name, prefixed by its namespace unless that is the default one."""
    namespace, name = pod["metadata"].get("namespace", "default"), pod["metadata"]["name"]
    return str(name) if namespace == "default" else f"{namespace}.{name}"


def named_ports(container: Mapping[str, Any]) -> dict[str, int]:
    return {port["name"]: int(port["containerPort"]) for port in container.get("ports", []) if "name" in port}


_REFERENCE: Final = re.compile(r"\$(\$|\(([-._a-zA-Z][-._a-zA-Z0-9]*)\))")
_SERVICE_NAME: Final = re.compile(r"\b([a-z0-9-]+)\.([a-z0-9-]+)\.([a-z0-9-]+)\.svc(?:\.cluster\.local)?\b")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value and `$$` by `$`; a reference to an unknown name is kept."""

    def _one(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return values.get(match[2], match[0])

    return _REFERENCE.sub(_one, text)


def resolve_service_names(text: str, address_of: Mapping[str, str]) -> str:
    """Replace pod names under headless services by addresses; raises `MissingObjectError` for an unknown pod."""

    def _one(match: re.Match[str]) -> str:
        name = f"{match[1]}.{match[2]}.{match[3]}"
        if name not in address_of:
            raise MissingObjectError(f"no pod on this node has the name {match[0]!r}")
        return address_of[name]

    return _SERVICE_NAME.sub(_one, text)


def container_env(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    pod_ip: str,
    objects: ObjectLookup,
    address_of: Mapping[str, str],
    rewriter: PathRewriter,
) -> dict[str, str]:
    """The variables of the manifest; raises `MissingObjectError` for an unresolved reference."""
    values: dict[str, str] = {}
    for entry in container.get("env", []):
        text = _entry_value(entry, pod, pod_ip, objects, values)
        if text is not None:
            values[entry["name"]] = text
    return {name: rewriter.rewrite(resolve_service_names(text, address_of)) for name, text in values.items()}


def _entry_value(
    entry: Mapping[str, Any],
    pod: Mapping[str, Any],
    pod_ip: str,
    objects: ObjectLookup,
    earlier: Mapping[str, str],
) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return expand(entry.get("value", ""), earlier)
    namespace = pod["metadata"].get("namespace", "default")
    match source:
        case {"fieldRef": {"fieldPath": str(path)}}:
            return pod_field(pod, pod_ip, path)
        case {"secretKeyRef": reference}:
            return _referenced_key("Secret", namespace, reference, objects)
        case {"configMapKeyRef": reference}:
            return _referenced_key("ConfigMap", namespace, reference, objects)
        case _:
            raise ValueError(f"env {entry['name']!r} has a source that this node does not support")


def _referenced_key(kind: str, namespace: str, reference: Mapping[str, Any], objects: ObjectLookup) -> str | None:
    name, key = reference["name"], reference["key"]
    found = objects.get(kind, namespace, name)
    if found is not None:
        if key in found.get("stringData", {}):
            return str(found["stringData"][key])
        if key in found.get("data", {}):
            text = str(found["data"][key])
            return base64.b64decode(text).decode() if kind == "Secret" else text
    if reference.get("optional"):
        return None
    raise MissingObjectError(f"{kind} {name!r} with key {key!r} does not exist in namespace {namespace!r}")


def pod_field(pod: Mapping[str, Any], pod_ip: str, path: str) -> str:
    """Value of a downward API field; raises `ValueError` for a field this node does not provide."""
    metadata = pod["metadata"]
    match path:
        case "status.podIP" | "status.hostIP":
            return pod_ip
        case "metadata.name" | "metadata.uid":
            return str(metadata[path.removeprefix("metadata.")])
        case "metadata.namespace":
            return str(metadata.get("namespace", "default"))
    match = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if match is None:
        raise ValueError(f"fieldPath {path!r} is not provided by this node")
    return str(metadata.get(match[1], {}).get(match[2], ""))
