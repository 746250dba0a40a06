"""Sets `replicas` of models with `spec.autoscaling` from the load that their engines report.

It writes the scale subresource, as a HorizontalPodAutoscaler does. It only overwrites the number that its decision was
based on, so that a user's concurrent change is kept. Its only memory is since when there were too many groups. A new
leader restarts that time, so it removes groups later, never sooner.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import ValidationError

from stageline_api.conditions import EventReason
from stageline_api.resource import pipeline_model
from stageline_api.resource.life.autoscaling import AutoscalingSpec
from stageline_kubernetes.client import JSON_PATCH, KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import PIPELINE_MODEL, ModelKey
from stageline_operator.controller.lead.leader import NotLeadingError
from stageline_operator.controller.loop.event_recorder import EventRecorder
from stageline_operator.controller.loop.refusals import Refusals
from stageline_operator.controller.settings import FIELD_MANAGER, OperatorSettings
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import recorded_status
from stageline_operator.controller.view.pod_poller import PodPoller
from stageline_operator.planner.autoscaling import Scaling, Surplus, decide
from stageline_operator.planner.types import GroupPhase, PlannedEvent

_LOOK_SECONDS: Final = 5.0
_MODELS_AT_ONCE: Final = 16
_SCALE: Final = ("scale",)
_TEST_FAILED: Final = 422
"""The status for a JSON patch with a failed test."""

_log = logging.getLogger(__name__)


class Autoscaler:
    """Scales all models. Belongs to one event loop."""

    def __init__(
        self, settings: OperatorSettings, api: KubeApi, cache: ObjectCache, events: EventRecorder, poller: PodPoller
    ) -> None:
        self._poller = poller
        self._settings = settings
        self._api = api
        self._cache = cache
        self._events = events
        self._surplus: dict[ModelKey, Surplus] = {}
        self._refusals = Refusals()

    async def run(self) -> None:
        """Check all models every few seconds, until cancelled."""
        while True:
            scaled = dict(self._scaled_models())
            self._surplus = {key: each for key, each in self._surplus.items() if key in scaled}
            waiting = list(scaled.items())
            for start in range(0, len(waiting), _MODELS_AT_ONCE):
                batch = waiting[start : start + _MODELS_AT_ONCE]
                await asyncio.gather(*(self._look_at(key, spec) for key, spec in batch))
            await asyncio.sleep(_LOOK_SECONDS)

    def _scaled_models(self) -> Iterator[tuple[ModelKey, AutoscalingSpec]]:
        """Models with autoscaling that this operator acts on."""
        for identity, manifest in self._cache.of_kind(pipeline_model.KIND):
            spec = manifest.get("spec") or {}
            if "autoscaling" not in spec or spec.get("suspend") or manifest["metadata"].get("deletionTimestamp"):
                continue
            if recorded_status(manifest).operator != self._settings.claim:
                continue
            try:
                given = AutoscalingSpec.read_accepted(spec["autoscaling"])
            except ValidationError:
                continue  # the reconcile of the model reports it in its status
            yield ModelKey(identity.namespace, identity.name), given

    async def _look_at(self, key: ModelKey, spec: AutoscalingSpec) -> None:
        manifest = self._cache.model(key)
        if manifest is None:
            return
        groups = recorded_status(manifest).groups
        ready = {group.index: group.incarnation for group in groups if group.phase == GroupPhase.READY}
        loads = await self._poller.loads(key, ready)
        replicas = int(manifest["spec"].get("replicas", 1))
        decided = decide(spec, replicas, len(ready), loads, self._surplus.pop(key, None), time.monotonic())
        if decided.surplus is not None:
            self._surplus[key] = decided.surplus
        if decided.replicas != replicas:
            await self._scale(key, manifest, replicas, decided)

    async def _scale(self, key: ModelKey, manifest: Mapping[str, Any], replicas: int, decided: Scaling) -> None:
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": manifest["metadata"]["uid"]},
            {"op": "test", "path": "/spec/replicas", "value": replicas},
            {"op": "replace", "path": "/spec/replicas", "value": decided.replicas},
        ]
        path = PIPELINE_MODEL.path(key.namespace, key.name, "scale")
        try:
            await self._api.patch(PIPELINE_MODEL, path, patch, JSON_PATCH, {"fieldManager": FIELD_MANAGER})
        except ApiError as error:
            _log.warning("replicas stay %d: %s", replicas, error, extra={"namespace": key.namespace, "model": key.name})
            # Another writer scaled it, or it is gone: the next check decides again.
            if error.is_not_found or error.is_conflict or error.status == _TEST_FAILED:
                return
            now = datetime.now(UTC)
            if self._refusals.note(key, _SCALE, key.name, error, now).should_report(now):
                words = f"replicas stay {replicas}, because the API server rejects {decided.replicas}: {error}"
                self._events.record(manifest, PlannedEvent("Warning", EventReason.SCALE_REFUSED, words))
        except NotLeadingError:
            _log.info("replicas stay %d: no longer leading", replicas)
        else:
            self._refusals.made(key, _SCALE)
            said = f"replicas {replicas} -> {decided.replicas}: {decided.why}"
            self._events.record(manifest, PlannedEvent("Normal", EventReason.SCALED, said))
