"""From a container's manifest to the command line, environment and files of a local process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stageline_local.node.container import ContainerCommand
from stageline_local.node.container_env import container_env, expand, resolve_service_names
from stageline_local.node.images import LocalImages
from stageline_local.node.mounts import ObjectLookup, PathRewriter, project_objects, realise_mounts

_DEFAULT_TERMINATION_PATH: Final = "/dev/termination-log"


@dataclass(frozen=True)
class ContainerSetting:
    """What all containers of a node share. `addresses` gives pod IPs by `<hostname>.<subdomain>.<namespace>`."""

    pods_dir: Path
    logs_dir: Path
    objects: ObjectLookup
    images: LocalImages
    addresses: Callable[[], Mapping[str, str]]


def build_command(
    pod: Mapping[str, Any], container: Mapping[str, Any], address: str, setting: ContainerSetting
) -> ContainerCommand:
    """Resolve everything a container needs; raises `MissingObjectError` when something is not there yet."""
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
    """Directory of a pod's files and logs: its name, with its namespace before it unless that is the default one."""
    namespace, name = pod["metadata"].get("namespace", "default"), pod["metadata"]["name"]
    return str(name) if namespace == "default" else f"{namespace}.{name}"


def named_ports(container: Mapping[str, Any]) -> dict[str, int]:
    """Container ports by name, for probes that name theirs."""
    return {port["name"]: int(port["containerPort"]) for port in container.get("ports", []) if "name" in port}
