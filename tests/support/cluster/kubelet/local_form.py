"""From a pod as an API server holds it to the pod that the process node runs. Pure.

Three things are taken away, each because somebody else has seen to it: what the scheduler has decided by, what the API
server has filled in with the value that means "nothing special", and devices, which the scheduler counts but a
process can't be given. A field with any other value stays, so that the process node refuses it.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_SCHEDULER_HAS_SEEN_TO: Final = (
    "nodeName",
    "nodeSelector",
    "affinity",
    "tolerations",
    "topologySpreadConstraints",
    "schedulerName",
    "priority",
    "priorityClassName",
    "preemptionPolicy",
)
_SAYS_NOTHING: Final[Mapping[str, Any]] = {"dnsPolicy": "ClusterFirst", "shareProcessNamespace": False}
_ACCOUNT_DIR: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_ACCOUNT_VOLUME: Final = "kube-api-access-"
_ACCOUNT_NAME: Final = "process-node-account"
ACCOUNT_FILE: Final = "kubeconfig"


@dataclass(frozen=True)
class LocalPod:
    """`manifest` is for the process node. `service_account` is set when containers may talk to the API server."""

    manifest: dict[str, Any]
    service_account: str | None


def local_form(pod: Mapping[str, Any]) -> LocalPod:
    """The pod as the process node takes it."""
    manifest = copy.deepcopy({name: value for name, value in pod.items() if name != "status"})
    spec = manifest["spec"]
    for name in _SCHEDULER_HAS_SEEN_TO:
        spec.pop(name, None)
    for name, value in _SAYS_NOTHING.items():
        if spec.get(name) == value:
            del spec[name]
    account = spec.pop("serviceAccountName", spec.pop("serviceAccount", None))
    spec.pop("serviceAccount", None)
    talks_to_api = _take_away_account_volume(spec)
    spec["automountServiceAccountToken"] = False
    for volume in spec.get("volumes", []):
        for source in volume.values():
            if isinstance(source, dict) and source.get("defaultMode") == 0o644:
                del source["defaultMode"]
    for container in _containers(spec):
        _take_away_devices(container)
    return LocalPod(manifest, account if talks_to_api else None)


def add_account(manifest: dict[str, Any], directory: Path) -> None:
    """Let every container find the kubeconfig in `directory`, in place of the token files it would have in a cluster.

    By a mount, because the text of a variable is rewritten for the container's mounts, `/tmp` among them.
    """
    volume = {"name": _ACCOUNT_NAME, "hostPath": {"path": str(directory), "type": "Directory"}}
    manifest["spec"].setdefault("volumes", []).append(volume)
    for container in _containers(manifest["spec"]):
        mount = {"name": _ACCOUNT_NAME, "mountPath": _ACCOUNT_DIR, "readOnly": True}
        container.setdefault("volumeMounts", []).append(mount)
        variable = {"name": "KUBECONFIG", "value": f"{_ACCOUNT_DIR}/{ACCOUNT_FILE}"}
        container["env"] = [variable, *container.get("env", [])]


def referenced_objects(manifest: Mapping[str, Any]) -> set[tuple[str, str]]:
    """(kind, name) of every ConfigMap and Secret that the pod's containers need."""
    spec = manifest["spec"]
    volumes = spec.get("volumes", [])
    found = {("ConfigMap", volume["configMap"]["name"]) for volume in volumes if "configMap" in volume}
    found |= {("Secret", volume["secret"]["secretName"]) for volume in volumes if "secret" in volume}
    for container in _containers(spec):
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {})
            for field, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                if field in source:
                    found.add((kind, source[field]["name"]))
    return found


def _containers(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def _take_away_account_volume(spec: dict[str, Any]) -> bool:
    """Remove the token volume that the API server adds; a process would look for it at a fixed path in vain."""
    added = {v["name"] for v in spec.get("volumes", []) if "projected" in v and v["name"].startswith(_ACCOUNT_VOLUME)}
    spec["volumes"] = [volume for volume in spec.get("volumes", []) if volume["name"] not in added]
    for container in _containers(spec):
        mounts = container.get("volumeMounts", [])
        container["volumeMounts"] = [m for m in mounts if m["name"] not in added or m["mountPath"] != _ACCOUNT_DIR]
    return bool(added)


def _take_away_devices(container: dict[str, Any]) -> None:
    for amounts in container.get("resources", {}).values():
        for name in [name for name in amounts if "/" in name]:
            del amounts[name]
