"""Pods of tiny Python containers, and waiting for a node to reach a state with a deadline."""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stageline_local.node.images import LocalImages, machine_environment
from stageline_local.node.process_node import ProcessNode
from stageline_local.session.object_store import ObjectStore

IMAGE = "test:local"


def python_container(script: str, /, name: str = "main", **fields: Any) -> dict[str, Any]:
    """A container that runs a Python script; `sys`, `os`, `time` and `signal` are imported for it."""
    command = [sys.executable, "-u", "-c", "import os, signal, sys, time\n" + script]
    return {"name": name, "image": IMAGE, "command": command} | fields


def pod_of(*containers: dict[str, Any], name: str = "p", **spec: Any) -> dict[str, Any]:
    """A pod that the node can honour."""
    base = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 10,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": "x"}},
        "spec": base | {"containers": list(containers)} | spec,
    }


class NodeFixture:
    """A process node in a directory of its own."""

    def __init__(self, state_dir: Path, memory_bytes: int = 2**40) -> None:
        self.state_dir = state_dir
        self.store = ObjectStore()
        images = LocalImages(frozenset({IMAGE}), machine_environment())
        self.node = ProcessNode(state_dir, self.store, images, lambda: None, lambda: memory_bytes)

    def status(self, name: str = "p") -> dict[str, Any]:
        return next(dict(pod["status"]) for pod in self.node.pods() if pod["metadata"]["name"] == name)

    def container(self, container: str = "main", name: str = "p") -> dict[str, Any]:
        status = self.status(name)
        every = status["initContainerStatuses"] + status["containerStatuses"]
        return next(dict(each) for each in every if each["name"] == container)

    def log(self, container: str = "main", name: str = "p") -> str:
        path = self.state_dir / "logs" / name / f"{container}.log"
        return path.read_text() if path.exists() else ""

    async def until(self, holds: Callable[[], Any], seconds: float = 90.0) -> None:
        """Wait until `holds()`; on timeout say what the node looks like."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                logs = {str(path): path.read_text()[-2000:] for path in self.state_dir.glob("logs/*/*.log")}
                raise AssertionError(json.dumps([self.node.pods(), logs], indent=1))
            # Files and processes change without the node's knowledge, so look now and then.
            await asyncio.sleep(0.02)

    async def until_ended(self, container: str = "main", name: str = "p") -> dict[str, Any]:
        """The `terminated` state of a container, once it has one."""
        await self.until(lambda: "terminated" in self.container(container, name)["state"])
        return dict(self.container(container, name)["state"]["terminated"])


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter when it ends between opening and reading
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
