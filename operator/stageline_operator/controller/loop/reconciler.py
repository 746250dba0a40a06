"""One pass over one PipelineModel: observe, plan, apply.

The order of writing is the plan's contract: status, deletions, objects, and pods last among these. Any failure ends
the pass; the next one begins with what is there by then, so nothing is done twice and nothing is remembered.

A watch may lag. Making what is missing is safe on an old view, because names are fixed: it exists already. Taking away
is not: a pod that only this operator has not heard of yet would look lost, and its healthy group would be replaced. So
a step that takes something away is planned again from the cluster as it is now.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from stageline_api import labels
from stageline_api.conditions import EventReason
from stageline_api.manifests.manifest_loader import parse_manifest
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.object_writes import (
    NameTakenError,
    StaleError,
    delete_object,
    put_object,
    write_status,
)
from stageline_operator.controller.client.resources import PIPELINE_MODEL, ModelKey, ObjectId
from stageline_operator.controller.lead.claims import AGAIN_SECONDS, Claims, LeftAlone, left_alone_words
from stageline_operator.controller.loop.cluster_view import ClusterView
from stageline_operator.controller.loop.event_recorder import EventRecorder
from stageline_operator.controller.loop.pod_refusals import PodRefusals, is_refusal
from stageline_operator.controller.loop.refused_model import refused_status, step_as_before
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.telemetry.transitions import transition_between
from stageline_operator.controller.view.gang_view import GangView, asks_for_native
from stageline_operator.controller.view.missing_rights import MissingRights
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import is_stage_pod, observe, recorded_status
from stageline_operator.controller.view.pod_troubles import PodTroubles
from stageline_operator.controller.view.stage_layers import StageLayers
from stageline_operator.planner.plan import plan, plan_ending
from stageline_operator.planner.types import GANG_KINDS, NATIVE_GROUP, Observed, Plan, PlannedEvent, Setting, kind_of

_TOKEN_BYTES: Final = 32
_ENDING_LOOK_SECONDS: Final = 10.0
"""How soon to look again at what is left of a model that ends."""
MISSING_SCHEDULER: Final = "placement.gang names a scheduler whose {} ({}) this cluster doesn't have"
NO_NATIVE_GANGS: Final = (
    "placement.gang asks for Kubernetes' own gang scheduling, and this cluster serves neither podgroups nor workloads "
    f"of {NATIVE_GROUP}: they, and the feature gates GenericWorkload and GangScheduling, are off by default"
)
_FORBIDDEN: Final = 403
_PODS_AT_ONCE: Final = 16
_PODS_A_PASS: Final = 128
_MAKING_SECONDS: Final = 20.0
"""After which a pass begins to make no more pods: it must end soon, also where admission webhooks take 30 s over each,
since whoever hangs is restarted."""


@dataclass(frozen=True)
class _Prepared:
    manifest: Mapping[str, Any]
    observed: Observed
    step: Plan


@dataclass(frozen=True)
class _Refused:
    manifest: Mapping[str, Any]
    before: PipelineModelStatus
    after: PipelineModelStatus


class Reconciler:
    """Runs passes. The queue never gives out one model twice at a time."""

    def __init__(
        self,
        api: KubeApi,
        cache: ObjectCache,
        view: ClusterView,
        setting: Setting,
        events: EventRecorder,
        metrics: OperatorMetrics,
        layers: StageLayers,
        troubles: PodTroubles,
        claims: Claims,
        gangs: GangView,
        missing_rights: MissingRights,
    ) -> None:
        self._api = api
        self._cache = cache
        self._view = view
        self._setting = setting
        self._events = events
        self._metrics = metrics
        self._layers = layers
        self._troubles = troubles
        self._claims = claims
        self._gangs = gangs
        self._missing_rights = missing_rights
        self._left_alone = LeftAlone()
        self._secrets: dict[ModelKey, tuple[str, frozenset[str]]] = {}
        """Uid and names of the Secrets made for each model: the operator may not look for them."""
        self._refusals = PodRefusals()
        self._refused_writes: dict[ModelKey, str] = {}
        """What else was refused in the last pass over a model, for its status; another process asks again."""

    async def reconcile(self, key: ModelKey) -> float | None:
        """One pass; returns when to look again, None for when something changes.

        Raises:
            StaleError: another writer was first; look again.
            NameTakenError: an object of a needed name belongs to someone else.
            ApiError: the API server did not do as asked.
        """
        if await self._is_anothers(key):
            return AGAIN_SECONDS
        prepared = await self._prepare(key)
        if isinstance(prepared, _Prepared) and needs_fresh_view(prepared.step, prepared.observed.status):
            await self._view.look_at_model(key)
            if await self._is_anothers(key):
                return AGAIN_SECONDS
            prepared = await self._prepare(key)
        match prepared:
            case None:
                # Gone or going: the garbage collector ends what it owns, pods with their grace.
                self._secrets.pop(key, None)
                self._refusals.forget(key)
                self._refused_writes.pop(key, None)
                return await self._end(key)
            case _Refused(manifest, before, after):
                await self._write(key, manifest, before, self._claims.claimed(after))
                return None
            case _Prepared(manifest, observed, step):
                has_more = await self._execute(key, manifest, observed, step)
                return 0.0 if has_more else step.requeue_after_seconds

    async def _is_anothers(self, key: ModelKey) -> bool:
        """Whether another operator acts on this model, as an Event says."""
        manifest = self._cache.model(key)
        holder = "" if manifest is None else recorded_status(manifest).operator
        if manifest is None or not await self._claims.is_anothers(holder, key.namespace):
            self._left_alone.forget(key)
            return False
        is_unreadable = self._claims.is_unreadable(holder)
        if self._left_alone.is_to_be_told(key, holder, time.monotonic(), again=is_unreadable):
            words = left_alone_words(key, self._claims.own, holder, is_unreadable=is_unreadable)
            self._events.record(manifest, PlannedEvent("Warning", EventReason.OTHER_OPERATOR, words))
        return True

    async def _end(self, key: ModelKey) -> float | None:
        """Of a model that ends, delete what is left on lost nodes, which nobody else would."""
        if not plan_ending(self._observe_ending(key), datetime.now(UTC)):
            return _ENDING_LOOK_SECONDS if self._observe_ending(key).pods else None
        await self._view.look_at_model(key)
        for deletion in plan_ending(self._observe_ending(key), datetime.now(UTC)):
            await self._delete(ObjectId(deletion.kind, key.namespace, deletion.name), deletion.grace_seconds)
        return _ENDING_LOOK_SECONDS

    def _observe_ending(self, key: ModelKey) -> Observed:
        nothing = PipelineModelStatus()
        return observe(self._cache, key, nothing, (), {}, {}, datetime.now(UTC), self._view.watches_nodes)

    async def _prepare(self, key: ModelKey) -> "_Prepared | _Refused | None":
        manifest = self._cache.model(key)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            return None
        model = parse_manifest({name: value for name, value in manifest.items() if name != "status"})
        before, now = recorded_status(manifest), datetime.now(UTC)
        observed = self._observe(key, manifest, before, now)
        if asks_for_native((manifest.get("spec") or {}, *observed.revision_specs.values())):
            observed = replace(observed, gang_api=await self._gangs.native_api())
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        if isinstance(model, PipelineModel):
            return _Prepared(manifest, observed, plan(model, observed, now, token, self._setting))
        refused = refused_status(before, manifest, model, now)
        step = step_as_before(
            manifest, observed, refused, lambda running: plan(running, observed, now, token, self._setting)
        )
        return _Refused(manifest, before, refused) if step is None else _Prepared(manifest, observed, step)

    def _observe(
        self, key: ModelKey, manifest: Mapping[str, Any], status: PipelineModelStatus, now: datetime
    ) -> Observed:
        uid, made = self._secrets.get(key, ("", frozenset()))
        own = made if uid == manifest["metadata"]["uid"] else frozenset()
        said = self._layers.known(key), self._troubles.known(key)
        seen = observe(self._cache, key, status, own, *said, now, self._view.watches_nodes)
        refused_write = self._refused_writes.get(key, "")
        return replace(seen, refused_pods=self._refusals.of_model(key), refusal=refused_write)

    async def _execute(self, key: ModelKey, manifest: Mapping[str, Any], observed: Observed, step: Plan) -> bool:
        """Returns whether the next pass has more to do at once: pods to make, or a refusal to put on record."""
        if missing := self._missing_rights.needed_for(step.apply):
            await self._leave_as_it_is(key, manifest, observed.status, step, missing)
        if begins_another_life(step, observed.status):
            # Make sure of the Secret again before the next pods: somebody may have deleted it.
            self._secrets.pop(key, None)
            self._refusals.forget(key)
        await self._write(key, manifest, observed.status, self._claims.claimed(step.status))
        transition = transition_between(observed.status, step.status, observed.pods, datetime.now(UTC))
        self._metrics.count_transition(key.namespace, key.name, transition)
        for event in step.events:
            self._events.record(manifest, event)
        for deletion in step.delete:
            with self._noting_refusal(key):
                await self._delete(ObjectId(deletion.kind, key.namespace, deletion.name), deletion.grace_seconds)
        # Everything a pod reads comes before the pod.
        uid = manifest["metadata"]["uid"]
        is_mended = await self._put_shared(key, uid, [each for each in step.apply if each["kind"] != "Pod"])
        pods = [each for each in step.apply if each["kind"] == "Pod"]
        return await self._make_pods(key, uid, pods) or is_mended

    async def _put_shared(self, key: ModelKey, uid: str, manifests: Sequence[Mapping[str, Any]]) -> bool:
        """Write what pods need; returns whether a refusal on record is true no longer."""
        for each in manifests:
            with self._noting_refusal(key, each):
                await self._put(key, uid, each)
        return self._refused_writes.pop(key, None) is not None

    @contextmanager
    def _noting_refusal(self, key: ModelKey, manifest: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Keep for the model's conditions that a write of `manifest`, or a deletion, is refused."""
        try:
            yield
        except ApiError as error:
            if manifest is not None and manifest["kind"] in GANG_KINDS and error.is_not_found:
                self._gangs.forget_native_api()
                self._refused_writes[key] = f"{_missing_gang(manifest)}: {error}"
            elif is_refusal(error):
                self._refused_writes[key] = str(error)
            raise

    async def _leave_as_it_is(
        self, key: ModelKey, manifest: Mapping[str, Any], before: PipelineModelStatus, step: Plan, missing: str
    ) -> NoReturn:
        """Do nothing of a step that needs a right which the operator lacks, but say so.

        Raises `ApiError`: half of a step could take a healthy group away and not be able to make the next one.
        """
        self._refused_writes[key] = missing
        conditions = {"conditions": step.status.conditions}
        await self._write(key, manifest, before, self._claims.claimed(before.model_copy(update=conditions)))
        raise ApiError(missing, _FORBIDDEN, "Forbidden")

    async def _make_pods(self, key: ModelKey, uid: str, pods: Sequence[Mapping[str, Any]]) -> bool:
        """Make pods, several at once; returns whether the next pass has more to do about them.

        Few at first and twice as many each time, so that a quota is not asked in vain for all of them: of a group of
        which one is refused no further one is tried for now. What is too many for one pass is left to the next.
        """
        refused_groups: set[str] = set()
        left, at_once = list(pods), 1
        end_at = time.monotonic() + _MAKING_SECONDS
        while left and len(pods) - len(left) < _PODS_A_PASS and time.monotonic() < end_at:
            batch, left = left[:at_once], left[at_once:]
            made = await asyncio.gather(*(self._make_pod(key, uid, each) for each in batch), return_exceptions=True)
            for failed in (each for each in made if isinstance(each, BaseException)):
                raise failed
            refused_groups |= {_group_of(each) for each, is_made in zip(batch, made, strict=True) if not is_made}
            left = [each for each in left if _group_of(each) not in refused_groups]
            at_once = min(_PODS_AT_ONCE, at_once * 2)
        return bool(refused_groups or left)

    async def _make_pod(self, key: ModelKey, uid: str, manifest: Mapping[str, Any]) -> bool:
        """Returns False for a pod that is refused."""
        name = manifest["metadata"]["name"]
        try:
            await self._put(key, uid, manifest)
        except ApiError as error:
            if not is_refusal(error):
                raise
            self._refusals.note(key, name, error, datetime.now(UTC))
            return False
        self._refusals.made(key, name)
        return True

    async def _write(
        self, key: ModelKey, manifest: Mapping[str, Any], before: PipelineModelStatus, after: PipelineModelStatus
    ) -> None:
        if after == before:
            return
        try:
            written = await write_status(self._api, manifest, after.to_manifest())
        except StaleError:
            # The cache may have missed a change; without this the next pass would fail alike.
            await self._view.look_at_status(key)
            raise
        self._cache.put(PIPELINE_MODEL.kind, written)

    async def _delete(self, identity: ObjectId, grace_seconds: float | None) -> None:
        known = self._cache.get(identity)
        if known is None:
            return
        ending = await delete_object(self._api, identity.kind, known, grace_seconds)
        if ending is None:
            self._cache.remove(identity.kind, known)
        else:
            self._cache.put(identity.kind, ending)

    async def _put(self, key: ModelKey, uid: str, manifest: Mapping[str, Any]) -> None:
        written: Mapping[str, Any] | None = await put_object(self._api, manifest)
        if written is None and manifest["kind"] == "Pod":
            written = await self._find_pod(key, manifest)
        if manifest["kind"] == "Secret":
            known_uid, made = self._secrets.get(key, ("", frozenset()))
            earlier = made if known_uid == uid else frozenset()
            self._secrets[key] = (uid, earlier | {manifest["metadata"]["name"]})
        elif written is not None:
            self._cache.put(kind_of(manifest), written)

    async def _find_pod(self, key: ModelKey, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The pod that has the name already, when an earlier pass made it; one that went meanwhile is made again."""
        name = manifest["metadata"]["name"]
        await self._view.look_at_model(key)
        known = self._cache.get(ObjectId("Pod", key.namespace, name))
        if known is not None:
            return None if is_stage_pod(known, key) else _refuse(name)
        return await put_object(self._api, manifest) or _refuse(name)


def _missing_gang(manifest: Mapping[str, Any]) -> str:
    is_native = manifest["apiVersion"].partition("/")[0] == NATIVE_GROUP
    return NO_NATIVE_GANGS if is_native else MISSING_SCHEDULER.format(manifest["kind"], manifest["apiVersion"])


def _group_of(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["labels"][labels.GROUP])


def _refuse(name: str) -> NoReturn:
    raise NameTakenError(f"Pod {name} exists and does not belong to this PipelineModel")


def needs_fresh_view(step: Plan, before: PipelineModelStatus) -> bool:
    """Whether the step deletes something, records a failure, or begins another life of a group on record."""
    if step.delete or step.status.last_failures != before.last_failures:
        return True
    return begins_another_life(step, before)


def begins_another_life(step: Plan, before: PipelineModelStatus) -> bool:
    incarnations = {group.index: group.incarnation for group in before.groups}
    return any(incarnations.get(group.index, group.incarnation) != group.incarnation for group in step.status.groups)
