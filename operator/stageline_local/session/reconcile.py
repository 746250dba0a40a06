"""The reconcile loop: observe node and store, plan one step, apply it; sleep until a change or a timeout.

Every reconcile starts from the observed state (level-triggered). Order of applying: status, deletions, objects.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime

from stageline_api import labels
from stageline_api.engine_access import KEYS_SECRET
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_local.node.process_node import ProcessNode
from stageline_local.session.object_store import ObjectStore
from stageline_operator.planner.observed.observed_objects import applied_hashes, revision_specs
from stageline_operator.planner.plan import plan
from stageline_operator.planner.types import Observed, Plan, PlannedEvent, Setting


class Reconciler:
    """Reconciles one PipelineModel on one node. Belongs to the node's event loop."""

    def __init__(
        self,
        model: PipelineModel,
        store: ObjectStore,
        node: ProcessNode,
        setting: Setting,
        on_status: Callable[[PipelineModelStatus], None] = lambda _: None,
        on_event: Callable[[PlannedEvent], None] = lambda _: None,
        on_pass: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_pass` gets the duration of each pass in seconds."""
        self._model = model
        self._store = store
        self._node = node
        self._setting = setting
        self._on_status = on_status
        self._on_event = on_event
        self._on_pass = on_pass
        self._changed = asyncio.Event()
        self.status = PipelineModelStatus()
        self._layers_of_pod: dict[str, str] = {}
        """The layers that stages report."""

    def wake(self) -> None:
        self._changed.set()

    def learn_layers(self, pod: str, layers: str) -> None:
        """Record a stage's layers for the status; only this reconciler writes the status."""
        if self._layers_of_pod.get(pod) != layers:
            self._layers_of_pod[pod] = layers
            self.wake()

    async def run(self) -> None:
        """Reconcile until cancelled. Raises `UserError` for a pod that the node refuses."""
        while True:
            self._changed.clear()
            began = time.monotonic()
            observed = self._observe()
            step = plan(self._model, observed, datetime.now(UTC), secrets.token_urlsafe(32), self._setting)
            changed_something = self._apply(step)
            self._on_pass(time.monotonic() - began)
            if changed_something:
                continue
            try:
                async with asyncio.timeout(step.requeue_after_seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _observe(self) -> Observed:
        namespace, name = self._model.namespace, self._model.name
        pods = [
            pod
            for pod in self._node.pods()
            if pod["metadata"].get("namespace", "default") == namespace
            and pod["metadata"].get("labels", {}).get(labels.MODEL) == name
        ]
        objects = {
            key: self._store.get(key[0], namespace, key[1]) or {}
            for key in (*self._store.labelled(namespace, labels.MODEL, name), *self._of_all_models())
        }
        return Observed(
            self.status,
            tuple(pods),
            frozenset(objects),
            dict(self._layers_of_pod),
            applied_hashes=applied_hashes(objects),
            revision_specs=revision_specs(objects.values()),
        )

    def _of_all_models(self) -> list[tuple[str, str]]:
        keys = ("Secret", KEYS_SECRET)
        return [] if self._store.get(keys[0], self._model.namespace, keys[1]) is None else [keys]

    def _apply(self, step: Plan) -> bool:
        """Execute a step; returns whether objects were created or deleted, so that another pass should follow
        at once.
        """
        if step.status != self.status:
            self.status = step.status
            self._on_status(step.status)
        for event in step.events:
            self._on_event(event)
        namespace = self._model.namespace
        for deletion in step.delete:
            if deletion.kind == "Pod":
                self._node.delete_pod(namespace, deletion.name, deletion.grace_seconds)
            else:
                self._store.delete(deletion.kind, namespace, deletion.name)
        # Objects that a pod reads come before the pod.
        for manifest in sorted(step.apply, key=lambda each: each["kind"] == "Pod"):
            if manifest["kind"] == "Pod":
                self._node.create_pod(manifest)
            else:
                self._store.apply(manifest)
        return bool(step.delete or step.apply)
