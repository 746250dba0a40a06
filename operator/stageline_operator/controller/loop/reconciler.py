"""One pass over one PipelineModel: observe, plan, apply.

The writes follow the plan's contract: status, deletions, objects, and pods last. A status that can't be written ends
the pass. The next one starts from the current state, so no step is executed twice. Any other write fails alone
(`object_writer`).

A watch may lag. Creating a missing object is safe on an outdated view, because names are fixed: the object exists
already. Deleting is not safe: a pod missing only in the cache would look lost, and its healthy group would be replaced.
So a step that deletes something is planned again from a fresh read.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from stageline_api.conditions import EventReason
from stageline_api.manifests.manifest_loader import parse_manifest
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.object_writes import StaleError, write_status
from stageline_operator.controller.client.resources import PIPELINE_MODEL, POD, ModelKey
from stageline_operator.controller.loop.cluster_view import ClusterView
from stageline_operator.controller.loop.event_recorder import EventRecorder
from stageline_operator.controller.loop.object_writer import WRITE_REFUSED, ObjectWriter, slot_of_deletion
from stageline_operator.controller.loop.refusals import PASS, slot_of
from stageline_operator.controller.settings import OperatorSettings
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.telemetry.transitions import transition_between
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import observe, recorded_status
from stageline_operator.controller.view.pod_poller import PodPoller
from stageline_operator.planner.plan import plan, plan_ending
from stageline_operator.planner.refused import plan_refused
from stageline_operator.planner.types import Observed, Plan, PlannedEvent, Setting, kind_of

_TOKEN_BYTES: Final = 32
_ENDING_LOOK_SECONDS: Final = 10.0
"""Requeue interval for the remaining objects of a deleted model."""
_REPORT_INTERVAL_SECONDS: Final = 300.0
"""Interval of the Event that a model belongs to another installation; Events expire within the hour."""
_FORBIDDEN: Final = 403
OTHER_OPERATOR: Final = (
    "the operator of Lease {own} refuses this model: status.operator names {holder}. If that operator is "
    "gone, hand the model over: kubectl -n {key.namespace} patch plm {key.name} --subresource=status --type=merge "
    """-p '{{"status":{{"operator":""}}}}'"""
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prepared:
    manifest: Mapping[str, Any]
    observed: Observed
    step: Plan


class Reconciler:
    """Runs passes. The queue never hands out a model that is being reconciled."""

    def __init__(
        self,
        settings: OperatorSettings,
        api: KubeApi,
        cache: ObjectCache,
        view: ClusterView,
        setting: Setting,
        events: EventRecorder,
        metrics: OperatorMetrics,
        poller: PodPoller,
    ) -> None:
        self._settings = settings
        self._api = api
        self._cache = cache
        self._view = view
        self._setting = setting
        self._events = events
        self._metrics = metrics
        self._poller = poller
        self._refused: dict[ModelKey, tuple[str, float]] = {}
        """Models of other installations: the Lease that the last Event named, and its time on the loop's clock."""
        self._writer = ObjectWriter(api, cache, view, events, metrics)

    async def reconcile(self, key: ModelKey) -> float | None:
        """One pass; returns the requeue time, None to wait for a change.

        Raises:
            StaleError: another writer was first; observe again.
            ApiError: the API server refused or failed.
        """
        try:
            return await self._pass(key)
        except ApiError as error:
            await self._report_failure(key, error)
            raise

    async def _pass(self, key: ModelKey) -> float | None:
        if self._is_foreign(key):
            return _REPORT_INTERVAL_SECONDS
        prepared = self._prepare(key)
        self._check_all_is_seen(key, prepared)
        if prepared is not None and needs_fresh_view(prepared.step, prepared.observed.status):
            await self._view.look_at_model(key)
            if self._is_foreign(key):
                return _REPORT_INTERVAL_SECONDS
            prepared = self._prepare(key)
        if prepared is None:
            # Gone or being deleted: the garbage collector deletes owned objects, pods with their grace period.
            self._writer.forget(key)
            return await self._end(key)
        return await self._execute(key, prepared.manifest, prepared.observed, prepared.step)

    def _is_foreign(self, key: ModelKey) -> bool:
        """Whether another installation owns this model, which an Event reports now and then: two operators must not
        both act.
        """
        manifest = self._cache.model(key)
        status = PipelineModelStatus() if manifest is None else recorded_status(manifest)
        if manifest is None or not self._settings.is_anothers(status):
            self._refused.pop(key, None)
            return False
        now = asyncio.get_running_loop().time()
        holder, reported_at = self._refused.get(key, ("", now))
        if holder != status.operator or now - reported_at >= _REPORT_INTERVAL_SECONDS:
            self._refused[key] = status.operator, now
            words = OTHER_OPERATOR.format(own=self._settings.claim, holder=status.operator, key=key)
            self._events.record(manifest, PlannedEvent("Warning", EventReason.OTHER_OPERATOR, words))
        return True

    async def _end(self, key: ModelKey) -> float | None:
        """Delete the pods of a deleted model on lost nodes; no kubelet confirms their end."""
        if not plan_ending(self._observe_ending(key), datetime.now(UTC)):
            return _ENDING_LOOK_SECONDS if self._observe_ending(key).pods else None
        await self._view.look_at_model(key)
        for deletion in plan_ending(self._observe_ending(key), datetime.now(UTC)):
            await self._writer.delete(key, deletion)
        return _ENDING_LOOK_SECONDS

    def _observe_ending(self, key: ModelKey) -> Observed:
        nothing = PipelineModelStatus()
        return observe(self._cache, key, nothing, (), {}, {}, datetime.now(UTC), self._view.watches_nodes)

    def _prepare(self, key: ModelKey) -> "_Prepared | None":
        manifest = self._cache.model(key)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            return None
        bare = {name: value for name, value in manifest.items() if name != "status"}
        model = parse_manifest(bare, ignores_unknown=True)
        before, now = recorded_status(manifest), datetime.now(UTC)
        observed = self._observe(key, manifest, before, now)
        if not isinstance(model, PipelineModel):
            return _Prepared(manifest, observed, plan_refused(manifest, model, observed, now, self._setting))
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        return _Prepared(manifest, observed, plan(model, observed, now, token, self._setting))

    def _observe(
        self, key: ModelKey, manifest: Mapping[str, Any], status: PipelineModelStatus, now: datetime
    ) -> Observed:
        own = self._writer.secrets_of(key, manifest["metadata"]["uid"])
        said = self._poller.layers(key), self._poller.troubles(key)
        seen = observe(self._cache, key, status, own, *said, now, self._view.watches_nodes)
        refusals = self._writer.refusals
        return replace(
            seen,
            refused_pods=refusals.pods(key, now),
            refusal=refusals.sentence(key, now),
            unchangeable=refusals.unchangeable(key),
        )

    async def _execute(
        self, key: ModelKey, manifest: Mapping[str, Any], observed: Observed, step: Plan
    ) -> float | None:
        """Returns the requeue time: 0 if pods must be created or a failure must be recorded."""
        if begins_another_life(step, observed.status):
            self._writer.recreate_secrets(key)
        await self._write(key, manifest, observed.status, self._claimed(step.status))
        transition = transition_between(observed.status, step.status, observed.pods, datetime.now(UTC))
        self._metrics.count_transition(key.namespace, key.name, transition)
        for event in step.events:
            self._events.record(manifest, event)
        has_more = await self._writer.carry_out(key, manifest, step)
        refusals, now = self._writer.refusals, datetime.now(UTC)
        wanted = {slot_of(each) for each in step.apply} | {slot_of_deletion(each) for each in step.delete}
        refusals.made(key, PASS)
        refusals.keep(key, wanted, {str(group.index) for group in step.status.groups})
        reported = refusals.sentence(key, now), refusals.pods(key, now).keys()
        if has_more or reported != (observed.refusal, observed.refused_pods.keys()):
            return 0.0
        waits = (step.requeue_after_seconds, refusals.next_look(key, wanted, now))
        return min((each for each in waits if each is not None), default=None)

    def _check_all_is_seen(self, key: ModelKey, prepared: "_Prepared | None") -> None:
        """Refuse the whole step if it needs a kind that can't be listed.

        Raises `ApiError`. Half of a step could delete a healthy group and then fail to create the next one; pods that
        can't be read look lost.
        """
        if prepared is not None:
            missing = self._view.missing(key.namespace, [POD.kind, *map(kind_of, prepared.step.apply)])
            if missing:
                raise ApiError(missing, _FORBIDDEN, "Forbidden")

    async def _report_failure(self, key: ModelKey, error: ApiError) -> None:
        """Report on the model that its passes fail, once that has lasted."""
        manifest, now = self._cache.model(key), datetime.now(UTC)
        if manifest is None or error.is_namespace_ending:
            return
        refusal = self._writer.refusals.note(key, PASS, key.name, error, now)
        if not refusal.should_report(now):
            return
        self._events.record(manifest, PlannedEvent("Warning", WRITE_REFUSED, refusal.message))
        try:
            prepared = self._prepare(key)
            if prepared is not None:
                before, conditions = prepared.observed.status, prepared.step.status.conditions
                after = before.model_copy(update={"conditions": conditions})
                await self._write(key, prepared.manifest, before, self._claimed(after))
        except (ApiError, StaleError) as also:
            _log.warning("the status does not say why: %s", also)

    def _claimed(self, status: PipelineModelStatus) -> PipelineModelStatus:
        """The status with this installation's Lease; empty without one, because another name would be wrong."""
        return status.model_copy(update={"operator": self._settings.claim})

    async def _write(
        self, key: ModelKey, manifest: Mapping[str, Any], before: PipelineModelStatus, after: PipelineModelStatus
    ) -> None:
        if after == before:
            return
        try:
            written = await write_status(self._api, manifest, after.to_manifest())
        except StaleError:
            # The cache may have missed a change; without this the next pass would fail again.
            await self._view.look_at_status(key)
            raise
        self._cache.put(PIPELINE_MODEL.kind, written)


def needs_fresh_view(step: Plan, before: PipelineModelStatus) -> bool:
    """Whether the step deletes an object, records a failure, or starts a new incarnation of a recorded group."""
    if step.delete or step.status.last_failures != before.last_failures:
        return True
    return begins_another_life(step, before)


def begins_another_life(step: Plan, before: PipelineModelStatus) -> bool:
    incarnations = {group.index: group.incarnation for group in before.groups}
    return any(incarnations.get(group.index, group.incarnation) != group.incarnation for group in step.status.groups)
