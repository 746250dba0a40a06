"""Sets `replicas` of models with `spec.autoscaling`, by the load that their engines tell; a pass then does the rest.

It writes the resource's scale, as an autoscaler of the cluster would, and only over the number that it decided from: a
person who scales at the same moment is not overruled unseen. What it remembers between looks is since when there have
been too many groups; another leader begins that time anew, and takes groups away later, never sooner.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
from pydantic import ValidationError

from stageline_api.conditions import EventReason
from stageline_api.resource import pipeline_model
from stageline_api.resource.life.autoscaling import AutoscalingSpec
from stageline_kubernetes.client import JSON_PATCH, KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import PIPELINE_MODEL, ModelKey
from stageline_operator.controller.lead.claims import Claims
from stageline_operator.controller.lead.leader import NotLeadingError
from stageline_operator.controller.loop.event_recorder import EventRecorder
from stageline_operator.controller.settings import FIELD_MANAGER
from stageline_operator.controller.view.engine_loads import engine_loads
from stageline_operator.controller.view.missing_rights import FORBIDDEN
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import recorded_status
from stageline_operator.planner.autoscaling import Scaling, Surplus, decide
from stageline_operator.planner.types import GroupPhase, PlannedEvent

_LOOK_SECONDS: Final = 5.0
_MODELS_AT_ONCE: Final = 16

_log = logging.getLogger(__name__)


class Autoscaler:
    """One for all models. Belongs to one event loop."""

    def __init__(self, api: KubeApi, cache: ObjectCache, events: EventRecorder, claims: Claims) -> None:
        self._api = api
        self._cache = cache
        self._events = events
        self._claims = claims
        self._surplus: dict[ModelKey, Surplus] = {}

    async def run(self) -> None:
        """Look at all models every few seconds, until cancelled."""
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                scaled = dict(self._scaled_models())
                self._surplus = {key: each for key, each in self._surplus.items() if key in scaled}
                waiting = list(scaled.items())
                for start in range(0, len(waiting), _MODELS_AT_ONCE):
                    batch = waiting[start : start + _MODELS_AT_ONCE]
                    await asyncio.gather(*(self._look_at(client, key, spec) for key, spec in batch))
                await asyncio.sleep(_LOOK_SECONDS)

    def _scaled_models(self) -> Iterator[tuple[ModelKey, AutoscalingSpec]]:
        """Models that are to be scaled and that this operator acts on."""
        for identity, manifest in self._cache.of_kind(pipeline_model.KIND):
            spec = manifest.get("spec") or {}
            if "autoscaling" not in spec or spec.get("suspend") or manifest["metadata"].get("deletionTimestamp"):
                continue
            if recorded_status(manifest).operator != self._claims.own:
                continue
            try:
                given = AutoscalingSpec.model_validate(spec["autoscaling"])
            except ValidationError:
                continue  # the pass over the model says so in its status
            yield ModelKey(identity.namespace, identity.name), given

    async def _look_at(self, client: httpx.AsyncClient, key: ModelKey, spec: AutoscalingSpec) -> None:
        manifest = self._cache.model(key)
        if manifest is None:
            return
        groups = recorded_status(manifest).groups
        ready = {group.index: group.incarnation for group in groups if group.phase == GroupPhase.READY}
        loads = await engine_loads(client, self._cache, key, ready)
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
            # Somebody else scaled it, or it is gone: the next look decides anew. All else is worth a line.
            _log.warning("replicas stay %d: %s", replicas, error, extra={"namespace": key.namespace, "model": key.name})
            if error.status in FORBIDDEN:
                words = f"replicas stay {replicas}, since the operator's role lacks a right: {error}"
                self._events.record(manifest, PlannedEvent("Warning", EventReason.SCALE_REFUSED, words))
        except NotLeadingError:
            _log.info("replicas stay %d: not leading any more", replicas)
        else:
            said = f"replicas {replicas} -> {decided.replicas}: {decided.why}"
            self._events.record(manifest, PlannedEvent("Normal", EventReason.SCALED, said))
