"""The kubelet's replacement: runs pod manifests as local processes and reports pod statuses.

Invariants: an unsupported manifest is refused before anything starts; every pod has its own address; when the node
ends, even by SIGKILL, its containers end too. It makes no decisions about groups.
"""

import asyncio
import copy
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stageline_api.errors import UserError
from stageline_api.resource.quantities import parse_quantity
from stageline_local.node.addresses import AddressLease, AddressPool
from stageline_local.node.container_command import ContainerSetting, pod_directory_name
from stageline_local.node.images import LocalImages
from stageline_local.node.mounts import ObjectLookup
from stageline_local.node.pod_fields import check_pod
from stageline_local.node.pod_runner import PodRunner
from stageline_local.node.pod_status import timestamp
from stageline_local.node.quantities import available_memory_bytes, format_bytes

_log = logging.getLogger(__name__)

PodKey = tuple[str, str]
"""(namespace, name)"""


@dataclass
class _HeldPod:
    runner: PodRunner
    lease: AddressLease
    deletion: asyncio.Task[None] | None = None
    deleted_at: str = ""


class ProcessNode:
    """The pods of one machine. Belongs to one event loop, in the main thread."""

    def __init__(
        self,
        state_dir: Path,
        objects: ObjectLookup,
        images: LocalImages,
        on_change: Callable[[], None] = lambda: None,
        memory_bytes: Callable[[], int] = available_memory_bytes,
        addresses: AddressPool | None = None,
        other_names: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`other_names` returns the addresses of pods on other nodes, by `<hostname>.<subdomain>.<namespace>`."""
        self._pods: dict[PodKey, _HeldPod] = {}
        self._on_change = on_change
        self._memory_bytes = memory_bytes
        self._initial_memory_bytes = memory_bytes()
        self._addresses = addresses or AddressPool()
        self._other_names = other_names
        self._pods_dir = state_dir / "pods"
        self._setting = ContainerSetting(self._pods_dir, state_dir / "logs", objects, images, self._names)

    def create_pod(self, pod: Mapping[str, Any]) -> None:
        """Accept a pod; its containers start as soon as the event loop runs.

        Raises `UnsupportedPodFieldError` for unsupported fields, `UserError` for a name in use.
        """
        check_pod(pod)
        key = _key(pod)
        if key in self._pods:
            raise UserError(f"pod {key[1]!r} already exists on this node")
        lease = self._addresses.lease()
        runner = PodRunner(copy.deepcopy(dict(pod)), lease.address, self._setting, self._on_change)
        self._pods[key] = _HeldPod(runner, lease)
        self._admit(runner)

    def delete_pod(self, namespace: str, name: str, grace_seconds: float | None = None) -> None:
        """Begin a graceful deletion; the pod is removed when its processes have ended. Unknown pods are no error.

        `grace_seconds` None uses the pod's `terminationGracePeriodSeconds`.
        """
        held = self._pods.get((namespace, name))
        if held is None or held.deletion is not None:
            return
        if grace_seconds is None:
            grace_seconds = float(held.runner.pod["spec"].get("terminationGracePeriodSeconds", 30))
        held.deleted_at = timestamp(datetime.now(UTC))
        held.deletion = asyncio.create_task(self._delete((namespace, name), held, grace_seconds))

    def pods(self) -> list[dict[str, Any]]:
        """All pods with their status, in order of creation; a pod being deleted has a `deletionTimestamp`."""
        return [self._observed(held) for held in self._pods.values()]

    def pid_of(self, namespace: str, name: str, container: str) -> int | None:
        held = self._pods.get((namespace, name))
        return held.runner.pid_of(container) if held else None

    async def close(self, grace_seconds: float | None = None) -> None:
        for namespace, name in list(self._pods):
            self.delete_pod(namespace, name, grace_seconds)
        await asyncio.gather(*(held.deletion for held in self._pods.values() if held.deletion is not None))

    def kill_now(self) -> None:
        """SIGKILL every container at once, if the user won't wait for `close`."""
        for held in self._pods.values():
            held.runner.kill_now()

    def _admit(self, runner: PodRunner) -> None:
        requested = requested_memory_bytes(runner.pod)
        free = min(self._memory_bytes(), self._initial_memory_bytes - self._admitted_memory_bytes())
        if requested > free:
            name = runner.pod["metadata"]["name"]
            runner.hold(
                f"too little memory: pod {name!r} requests {format_bytes(requested)}, "
                f"this machine has {format_bytes(max(0, free))} free for it"
            )
        else:
            runner.start()

    def _admitted_memory_bytes(self) -> float:
        return sum(requested_memory_bytes(held.runner.pod) for held in self._pods.values() if held.runner.is_admitted)

    async def _delete(self, key: PodKey, held: _HeldPod, grace_seconds: float) -> None:
        try:
            await held.runner.stop(grace_seconds)
        finally:
            del self._pods[key]
            held.lease.release()
            shutil.rmtree(self._pods_dir / pod_directory_name(held.runner.pod), ignore_errors=True)
            _log.info("pod %s is gone", key[1])
        for waiting in self._pods.values():
            if not waiting.runner.is_admitted and waiting.deletion is None:
                self._admit(waiting.runner)
        self._on_change()

    def _names(self) -> dict[str, str]:
        """Addresses by `<hostname>.<subdomain>.<namespace>`, as headless services resolve them."""
        names = dict(self._other_names())
        for (namespace, name), held in self._pods.items():
            spec = held.runner.pod["spec"]
            if spec.get("subdomain"):
                names[f"{spec.get('hostname', name)}.{spec['subdomain']}.{namespace}"] = held.runner.address
        return names

    def _observed(self, held: _HeldPod) -> dict[str, Any]:
        pod = held.runner.pod
        metadata = dict(pod["metadata"])
        if held.deletion is not None:
            metadata["deletionTimestamp"] = held.deleted_at
        return {**pod, "metadata": metadata, "status": held.runner.status()}


def requested_memory_bytes(pod: Mapping[str, Any]) -> float:
    """Memory request of a pod as the scheduler computes it: the sum of its containers, or a larger init container."""

    def _of(container: Mapping[str, Any]) -> float:
        return parse_quantity(container.get("resources", {}).get("requests", {}).get("memory", 0))

    spec = pod["spec"]
    return max(
        sum(_of(container) for container in spec["containers"]),
        max((_of(container) for container in spec.get("initContainers", [])), default=0),
    )


def _key(pod: Mapping[str, Any]) -> PodKey:
    return pod["metadata"].get("namespace", "default"), pod["metadata"]["name"]
