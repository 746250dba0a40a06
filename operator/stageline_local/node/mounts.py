"""Volumes as directories, and mount paths rewritten to them.

A local process has no mount namespace, so the directories behind a container's mount points replace them. The rule: a
mount path is replaced wherever it is a whole path, or the leading part of one. That includes env values, the command,
arguments and the text of a mounted ConfigMap. The longest mount path wins, and replaced text is not scanned again. The
termination message path is treated like a mount of one file. Hard-coded paths in programs are not replaced, so
manifests must name their paths (`TMPDIR=/tmp`, `STAGELINE_CONFIG=/etc/stageline/...`).
"""

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class ObjectLookup(Protocol):
    """A node's source of ConfigMaps and Secrets."""

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """The object, or None if it does not exist."""


class PathRewriter:
    def __init__(self, local_path_of: Mapping[str, Path]) -> None:
        self._local_path_of = {path.rstrip("/") or "/": local for path, local in local_path_of.items()}
        longest_first = sorted(self._local_path_of, key=len, reverse=True)
        alternatives = "|".join(re.escape(path) for path in longest_first)
        self._pattern = re.compile(rf"(?<![\w./-])(?:{alternatives})(?![\w.-])") if longest_first else None

    def rewrite(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: str(self._local_path_of[match[0]]), text)


class MissingObjectError(LookupError):
    """A volume or an env entry names an object or a key that does not exist (yet)."""


def realise_mounts(pod: Mapping[str, Any], container: Mapping[str, Any], pod_dir: Path) -> dict[str, Path]:
    """Directories of a container's volume mounts, by mount path; emptyDirs are created and shared by the pod."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    local_path_of: dict[str, Path] = {}
    for mount in container.get("volumeMounts", []):
        root = _volume_root(volumes[mount["name"]], container["name"], pod_dir)
        local = root / mount.get("subPath", "")
        if not local.exists():
            local.mkdir(parents=True)  # as a kubelet does
        local_path_of[mount["mountPath"]] = local
    return local_path_of


def _volume_root(volume: Mapping[str, Any], container_name: str, pod_dir: Path) -> Path:
    root: Path
    match volume:
        case {"hostPath": {"path": str(path)} as source}:
            return _host_path(Path(path), source.get("type", ""))
        case {"emptyDir": _}:
            root = pod_dir / "volumes" / volume["name"]
        case {"configMap": _} | {"secret": _}:
            # One copy per container: a ConfigMap's text is rewritten for that container's mounts.
            root = pod_dir / "volumes" / container_name / volume["name"]
        case _:
            raise ValueError(f"volume {volume['name']!r} has a source that this node does not support")
    root.mkdir(parents=True, exist_ok=True)
    return root


def _host_path(path: Path, kind: str) -> Path:
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if kind == "Directory" and not path.is_dir():
        raise MissingObjectError(f"hostPath {str(path)!r} is not a directory on this machine")
    return path


def project_objects(
    pod: Mapping[str, Any], container: Mapping[str, Any], pod_dir: Path, objects: ObjectLookup, rewriter: PathRewriter
) -> None:
    """Write the files of a container's ConfigMap and Secret mounts; raises `MissingObjectError` for a missing
    object.
    """
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    namespace = pod["metadata"].get("namespace", "default")

    def _object(kind: str, name: str) -> dict[str, Any]:
        found = objects.get(kind, namespace, name)
        if found is None:
            raise MissingObjectError(f"{kind} {name!r} does not exist in namespace {namespace!r}")
        return found

    for volume in pod["spec"].get("volumes", []):
        if volume["name"] not in mounted:
            continue
        match volume:
            case {"configMap": {"name": name}}:
                root = _volume_root(volume, container["name"], pod_dir)
                for file_name, text in _object("ConfigMap", name).get("data", {}).items():
                    (root / file_name).write_text(rewriter.rewrite(text))
            case {"secret": {"secretName": name}}:
                root = _volume_root(volume, container["name"], pod_dir)
                for file_name, content in _secret_files(_object("Secret", name)).items():
                    _write_private(root / file_name, content)


def _secret_files(secret: Mapping[str, Any]) -> dict[str, bytes]:
    """Contents by file name; a local manifest still has `stringData`."""
    encoded = {name: base64.b64decode(text) for name, text in secret.get("data", {}).items()}
    return encoded | {name: str(text).encode() for name, text in secret.get("stringData", {}).items()}


def _write_private(file: Path, content: bytes) -> None:
    file.touch(mode=0o600)
    file.write_bytes(content)
