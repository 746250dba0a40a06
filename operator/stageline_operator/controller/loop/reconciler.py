"""One pass over one PipelineModel: observe, plan, apply.

The order of writing is the plan's contract: status, deletions, objects, and pods last among these. Any failure ends
the pass; the next one begins with what is there by then, so nothing is done twice and nothing is remembered.

A watch may lag. Making what is missing is safe on an old view, because names are fixed: it exists already. Taking away
is not: a pod that only this operator has not heard of yet would look lost, and its healthy group would be replaced. So
a step that takes something away is planned again from the cluster as it is now.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from stageline_api.conditions import ConditionType, Reason
from stageline_api.manifests.manifest_loader import parse_manifest
from stageline_api.resource.field_problem import FieldProblem
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.status import Condition, PipelineModelStatus
from stageline_kubernetes.client import KubeApi
from stageline_operator.controller.client.object_writes import (
    NameTakenError,
    StaleError,
    delete_object,
    put_object,
    write_status,
)
from stageline_operator.controller.client.resources import PIPELINE_MODEL, ModelKey, ObjectId
from stageline_operator.controller.loop.cluster_view import ClusterView
from stageline_operator.controller.loop.event_recorder import EventRecorder
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.telemetry.transitions import transition_between
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import is_stage_pod, observe, recorded_status
from stageline_operator.controller.view.pod_troubles import PodTroubles
from stageline_operator.controller.view.stage_layers import StageLayers
from stageline_operator.planner.plan import plan
from stageline_operator.planner.types import Observed, Plan, Setting

_TOKEN_BYTES: Final = 32


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
    ) -> None:
        self._api = api
        self._cache = cache
        self._view = view
        self._setting = setting
        self._events = events
        self._metrics = metrics
        self._layers = layers
        self._troubles = troubles
        self._secrets: dict[ModelKey, tuple[str, frozenset[str]]] = {}
        """Uid and names of the Secrets made for each model: the operator may not look for them."""

    async def reconcile(self, key: ModelKey) -> float | None:
        """One pass; returns when to look again, None for when something changes.

        Raises:
            StaleError: another writer was first; look again.
            NameTakenError: an object of a needed name belongs to someone else.
            ApiError: the API server did not do as asked.
        """
        prepared = self._prepare(key)
        if isinstance(prepared, _Prepared) and needs_fresh_view(prepared.step, prepared.observed.status):
            await self._view.look_at_model(key)
            prepared = self._prepare(key)
        match prepared:
            case None:
                # Gone or going: the garbage collector ends what it owns, pods with their grace.
                self._secrets.pop(key, None)
                return None
            case _Refused(manifest, before, after):
                await self._write(key, manifest, before, after)
                return None
            case _Prepared(manifest, observed, step):
                await self._execute(key, manifest, observed, step)
                return step.requeue_after_seconds

    def _prepare(self, key: ModelKey) -> "_Prepared | _Refused | None":
        manifest = self._cache.model(key)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            return None
        model = parse_manifest({name: value for name, value in manifest.items() if name != "status"})
        before, now = recorded_status(manifest), datetime.now(UTC)
        if not isinstance(model, PipelineModel):
            return _Refused(manifest, before, refused_status(before, manifest, model, now))
        observed = self._observe(key, manifest, before)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        return _Prepared(manifest, observed, plan(model, observed, now, token, self._setting))

    def _observe(self, key: ModelKey, manifest: Mapping[str, Any], status: PipelineModelStatus) -> Observed:
        uid, made = self._secrets.get(key, ("", frozenset()))
        own = made if uid == manifest["metadata"]["uid"] else frozenset()
        said = self._layers.known(key), self._troubles.known(key)
        return observe(self._cache, key, status, own, *said, self._view.watches_nodes)

    async def _execute(self, key: ModelKey, manifest: Mapping[str, Any], observed: Observed, step: Plan) -> None:
        if begins_another_life(step, observed.status):
            # Make sure of the Secret again before the next pods: somebody may have deleted it.
            self._secrets.pop(key, None)
        await self._write(key, manifest, observed.status, step.status)
        transition = transition_between(observed.status, step.status, observed.pods, datetime.now(UTC))
        self._metrics.count_transition(key.namespace, key.name, transition)
        for event in step.events:
            self._events.record(manifest, event)
        for deletion in step.delete:
            await self._delete(ObjectId(deletion.kind, key.namespace, deletion.name), deletion.grace_seconds)
        # Everything a pod reads comes before the pod.
        for each in sorted(step.apply, key=lambda wanted: wanted["kind"] == "Pod"):
            await self._put(key, manifest["metadata"]["uid"], each)

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
            self._cache.put(manifest["kind"], written)

    async def _find_pod(self, key: ModelKey, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The pod that has the name already, when an earlier pass made it; one that went meanwhile is made again."""
        name = manifest["metadata"]["name"]
        await self._view.look_at_model(key)
        known = self._cache.get(ObjectId("Pod", key.namespace, name))
        if known is not None:
            return None if is_stage_pod(known, key) else _refuse(name)
        return await put_object(self._api, manifest) or _refuse(name)


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


def refused_status(
    before: PipelineModelStatus, manifest: Mapping[str, Any], problems: Sequence[FieldProblem], now: datetime
) -> PipelineModelStatus:
    """The cluster accepted a spec that this version can't run: conditions name the fields, and groups run on."""
    generation = manifest["metadata"].get("generation")
    sentence = "; ".join(str(problem) for problem in problems)[:32_000]
    verdicts = {ConditionType.DEGRADED: "True", ConditionType.READY: "False", ConditionType.PROGRESSING: "False"}
    kept = {condition.type: condition for condition in before.conditions}
    for kind, status in verdicts.items():
        known = kept.get(kind)
        kept[kind] = Condition(
            type=kind,
            status="True" if status == "True" else "False",
            observed_generation=generation,
            last_transition_time=known.last_transition_time if known and known.status == status else now,
            reason=Reason.BAD_CONFIGURATION,
            message=sentence,
        )
    return before.model_copy(update={"observed_generation": generation, "conditions": tuple(kept.values())})
