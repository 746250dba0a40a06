"""Executes the deletions and writes of a step, object by object.

A failed write holds up only the pods of groups that need the object, and not even those if the object exists and only
its change is refused. Writes that failed before are retried last, after all others.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn

from stageline_api import labels
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.object_writes import (
    NameTakenError,
    StaleError,
    delete_object,
    put_object,
)
from stageline_operator.controller.client.resources import ModelKey, ObjectId
from stageline_operator.controller.loop.cluster_view import ClusterView
from stageline_operator.controller.loop.event_recorder import EventRecorder
from stageline_operator.controller.loop.refusals import Refusal, Refusals, Slot, WriteError, is_pod, slot_of
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import is_stage_pod
from stageline_operator.planner.types import NATIVE_GROUP, POD_GROUP, Deletion, Plan, PlannedEvent, kind_of

NAME_TAKEN: Final = "NameTaken"
WRITE_REFUSED: Final = "WriteRefused"
MISSING_SCHEDULER: Final = "placement.gang names a scheduler whose {} ({}) this cluster doesn't have"
NO_NATIVE_GANGS: Final = (
    "placement.gang asks for Kubernetes' own gang scheduling, and this cluster doesn't serve podgroups of "
    f"{NATIVE_GROUP}/v1beta1: they need Kubernetes 1.37 and are off by default, like the feature gate GenericWorkload"
)
_WRITES_AT_ONCE: Final = 16
_PODS_A_PASS: Final = 128
_WORKING_SECONDS: Final = 20.0
"""After this time a pass begins no more writes. It must end soon even if admission webhooks take 30 s per write: a
hanging pass restarts the operator.
"""

Model = Mapping[str, Any]
Write = Callable[[], Awaitable[None]]


class ObjectWriter:
    """Executes steps, never two at a time for one model. Belongs to one event loop."""

    def __init__(
        self,
        api: KubeApi,
        cache: ObjectCache,
        view: ClusterView,
        events: EventRecorder,
        metrics: OperatorMetrics,
    ) -> None:
        self._api = api
        self._cache = cache
        self._view = view
        self._events = events
        self._metrics = metrics
        self.refusals = Refusals()
        self._secrets: dict[ModelKey, tuple[str, frozenset[str]]] = {}
        """Uid and Secret names of each model whose Secrets were created: the operator may not read Secrets."""

        self._at_once: dict[ModelKey, int] = {}
        """How many pods the next pass over a model creates at once, if there are more to create."""

    def secrets_of(self, key: ModelKey, uid: str) -> frozenset[str]:
        """Names of the Secrets that were created for the model with this uid."""
        known_uid, made = self._secrets.get(key, ("", frozenset()))
        return made if known_uid == uid else frozenset()

    def recreate_secrets(self, key: ModelKey) -> None:
        """Create the Secrets again before the next pods: a user may have deleted them."""
        self._secrets.pop(key, None)
        self.refusals.retry_pods(key, datetime.now(UTC))

    def forget(self, key: ModelKey) -> None:
        """Drop the state of a deleted model."""
        self._secrets.pop(key, None)
        self._at_once.pop(key, None)
        self.refusals.forget(key)

    async def carry_out(self, key: ModelKey, model: Model, step: Plan) -> bool:
        """Returns whether the next pass must follow at once. Raises `ApiError` if the namespace is terminating."""
        end_at = time.monotonic() + _WORKING_SECONDS
        shared = [each for each in step.apply if each["kind"] != "Pod"]
        fresh = [each for each in shared if not self.refusals.knows(key, slot_of(each))]
        for writes in (
            [partial(self._delete, key, model, each) for each in step.delete],
            [partial(self._put, key, model, each) for each in fresh],
        ):
            if not await _write_all(writes, end_at):
                return True
        failed = [each for each in shared if self.refusals.knows(key, slot_of(each))]
        pods = [each for each in step.apply if each["kind"] == "Pod"]
        held = self._held_groups(key, step, failed, {_group_of(each) for each in pods})
        held |= {group for each in step.delete for group in step.needed_by.get((each.kind, each.name), ())}
        has_more = await self._make_pods(key, model, [each for each in pods if _group_of(each) not in held], end_at)
        await _write_all([partial(self._put, key, model, each) for each in failed], end_at)
        return has_more or not all(self.refusals.knows(key, slot_of(each)) for each in failed)

    def _held_groups(
        self, key: ModelKey, step: Plan, failed: Sequence[Mapping[str, Any]], groups: AbstractSet[int]
    ) -> set[int]:
        """The groups that need an object which could not be written."""
        held: set[int] = set()
        for each in failed:
            if not self._is_usable(key, step, each):
                held |= step.needed_by.get((kind_of(each), each["metadata"]["name"]), groups)
        return held

    def _is_usable(self, key: ModelKey, step: Plan, manifest: Mapping[str, Any]) -> bool:
        """Whether the old version of the object exists and is sufficient for pods."""
        if manifest["kind"] == "Secret":  # it can't be read, and existed when a group served
            return any(group.served for group in step.status.groups)
        identity = ObjectId(kind_of(manifest), key.namespace, manifest["metadata"]["name"])
        known = self._cache.get(identity)
        is_ours = known is not None and not known["metadata"].get("deletionTimestamp")
        return is_ours and (identity.kind, identity.name) not in self.refusals.unchangeable(key)

    async def _make_pods(self, key: ModelKey, model: Model, pods: Sequence[Mapping[str, Any]], end_at: float) -> bool:
        """Create pods, several at once; returns whether the next pass must create more.

        The first batch is small and each next one doubles, so that a used-up quota refuses few requests. If one pod of
        a group is refused, no more pods of that group are tried for now. The next pass creates the rest.
        """
        now = datetime.now(UTC)
        waiting = {_group_of(each) for each in pods if self.refusals.waits(key, slot_of(each), now)}
        left = [each for each in pods if _group_of(each) not in waiting]
        left.sort(key=lambda each: self.refusals.knows(key, slot_of(each)))
        at_once, asked = self._at_once.pop(key, 1), 0
        refused: set[int] = set()
        while left and asked < _PODS_A_PASS and time.monotonic() < end_at:
            batch, left = left[:at_once], left[at_once:]
            asked += len(batch)
            await _write_all([partial(self._put, key, model, each) for each in batch], end_at)
            refused |= {_group_of(each) for each in batch if self.refusals.knows(key, slot_of(each))}
            left = [each for each in left if _group_of(each) not in refused]
            at_once = min(_WRITES_AT_ONCE, at_once * 2)
        if left and not refused:
            self._at_once[key] = at_once  # with slow admission webhooks a pass ends after one batch
        return bool(refused or left)

    async def _put(self, key: ModelKey, model: Model, manifest: Mapping[str, Any]) -> None:
        write = partial(self._write, key, model["metadata"]["uid"], manifest)
        await self._attempt(key, model, slot_of(manifest), manifest, write)

    async def _delete(self, key: ModelKey, model: Model, deletion: Deletion) -> None:
        named = {"metadata": {"name": deletion.name}}
        await self._attempt(key, model, slot_of_deletion(deletion), named, partial(self.delete, key, deletion))

    async def delete(self, key: ModelKey, deletion: Deletion) -> None:
        """Delete one object. Raises `ApiError`, `StaleError`."""
        identity = ObjectId(deletion.kind, key.namespace, deletion.name)
        known = self._cache.get(identity)
        if known is None:
            return
        ending = await delete_object(self._api, identity.kind, known, deletion.grace_seconds)
        if ending is None:
            self._cache.remove(identity.kind, known)
        else:
            self._cache.put(identity.kind, ending)
        self.refusals.made(key, (deletion.kind, deletion.name))

    async def _attempt(
        self,
        key: ModelKey,
        model: Model,
        slot: Slot,
        manifest: Mapping[str, Any],
        write: Write,
    ) -> None:
        """Write, unless the same write failed a moment ago; a failure is noted and reported."""
        if self.refusals.waits(key, slot, datetime.now(UTC)):
            return
        try:
            await write()
        except (ApiError, NameTakenError, StaleError) as error:
            if isinstance(error, ApiError) and error.is_namespace_ending:
                raise
            name, words = manifest["metadata"]["name"], _gang_words(manifest, error)
            self._report(key, model, slot, error, self.refusals.note(key, slot, name, error, datetime.now(UTC), words))
        else:
            self.refusals.made(key, slot)

    def _report(self, key: ModelKey, model: Model, slot: Slot, error: WriteError, refusal: Refusal) -> None:
        """Count a failure, and post an Event once it has lasted; the planner reports refused pods."""
        is_taken = isinstance(error, NameTakenError)
        if not is_pod(slot):
            kind = "name_taken" if is_taken else "unavailable" if refusal.is_passing else "refused"
            self._metrics.reconcile_errors.labels(key.namespace, key.name, kind).inc()
        is_remade = refusal.is_unchangeable  # the planner reports it
        if refusal.should_report(datetime.now(UTC)) and (is_taken or not is_pod(slot)) and not is_remade:
            reason = NAME_TAKEN if is_taken else WRITE_REFUSED
            self._events.record(model, PlannedEvent("Warning", reason, refusal.message))

    async def _write(self, key: ModelKey, uid: str, manifest: Mapping[str, Any]) -> None:
        written: Mapping[str, Any] | None = await put_object(self._api, manifest)
        if written is None and manifest["kind"] == "Pod":
            written = await self._find_pod(key, manifest)
        if manifest["kind"] == "Secret":
            self._secrets[key] = (uid, self.secrets_of(key, uid) | {manifest["metadata"]["name"]})
        elif written is not None:
            self._cache.put(kind_of(manifest), written)

    async def _find_pod(self, key: ModelKey, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """An existing pod of that name, created by an earlier pass; None if it is gone, to create it again."""
        name = manifest["metadata"]["name"]
        await self._view.look_at_model(key)
        known = self._cache.get(ObjectId("Pod", key.namespace, name))
        if known is not None:
            return None if is_stage_pod(known, key) else _refuse(name)
        return await put_object(self._api, manifest) or _refuse(name)


async def _write_all(writes: Sequence[Write], end_at: float) -> bool:
    """Run several at once; returns whether there was time for all. Raises the first error."""
    for start in range(0, len(writes), _WRITES_AT_ONCE):
        if time.monotonic() >= end_at:
            return False
        batch = writes[start : start + _WRITES_AT_ONCE]
        ended = await asyncio.gather(*(write() for write in batch), return_exceptions=True)
        for failed in (each for each in ended if isinstance(each, BaseException)):
            raise failed
    return True


def slot_of_deletion(deletion: Deletion) -> Slot:
    return "delete", deletion.kind, deletion.name


def _gang_words(manifest: Mapping[str, Any], error: WriteError) -> str:
    """The message for a PodGroup whose kind is not installed; empty for any other failure."""
    if not (isinstance(error, ApiError) and error.is_not_found and manifest.get("kind") == POD_GROUP):
        return ""
    is_native = manifest["apiVersion"].partition("/")[0] == NATIVE_GROUP
    words = NO_NATIVE_GANGS if is_native else MISSING_SCHEDULER.format(manifest["kind"], manifest["apiVersion"])
    return f"{words}: {error}"


def _group_of(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["labels"][labels.GROUP])


def _refuse(name: str) -> NoReturn:
    raise NameTakenError(f"Pod {name} exists and does not belong to this PipelineModel")
