"""Where kubectl would find its login, told without a Kubernetes client."""

import os
from pathlib import Path


def kubeconfig_files() -> str:
    """`$KUBECONFIG`, which may be several files joined by colons, else the file in the home directory."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def has_kubeconfig() -> bool:
    """Whether any of these files is there."""
    return any(Path(each).exists() for each in kubeconfig_files().split(os.pathsep) if each)


def is_in_cluster() -> bool:
    """Whether this process runs in a pod that was given a service account."""
    return "KUBERNETES_SERVICE_HOST" in os.environ
