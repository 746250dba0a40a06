"""Writes kubeconfigs that let one user in, by a token or by nothing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_kubeconfig(
    file: Path, cluster: Mapping[str, Any], user: str, token: str = "", namespace: str = "default"
) -> None:
    """Write `file`, readable by its owner only; `cluster` is the section of that name: server and authority."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
        "clusters": [{"name": "test", "cluster": dict(cluster)}],
        "users": [{"name": user, "user": {"token": token} if token else {}}],
    }
    file.touch(mode=0o600)
    # JSON is YAML.
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")
