"""Finds a cluster login and the namespaces to use, without a Kubernetes library."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SERVICE_HOST_VARIABLE: Final = "KUBERNETES_SERVICE_HOST"
NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def read_namespaces(given: Iterable[str]) -> tuple[str, ...]:
    """The names in a repeated option's values, which may be comma-separated; duplicates count once.

    Raises:
        ValueError: one can't be a namespace's name.
    """
    found = [name.strip() for text in given for name in text.split(",")]
    for name in found:
        if not NAMESPACE.fullmatch(name):
            raise ValueError(f'"{name}" is not the name of a namespace')
    return tuple(dict.fromkeys(found))


def kubeconfig_files() -> str:
    """`$KUBECONFIG`, perhaps several files joined by colons, else the file in the home directory."""
    # Read at each call: the library reads its environment only once, when it is imported.
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def has_kubeconfig() -> bool:
    """Whether any of these files exists."""
    return any(Path(each).exists() for each in kubeconfig_files().split(os.pathsep) if each)


def is_in_cluster() -> bool:
    """Whether this process runs in a pod, which has the API server's address in its environment."""
    return _SERVICE_HOST_VARIABLE in os.environ


def own_namespace() -> str | None:
    """Namespace of this process's pod; None outside a cluster."""
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
