"""What the engines of a model's ready groups say of their load, asked by HTTP like any client.

An engine that does not answer in time, or answers nonsense, is left out: whoever decides must not take it for idle.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import httpx
from pydantic import ValidationError

from stageline_api import labels, ports
from stageline_api.health import EngineStatus, Phase
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.pod_status import is_owned, status_of
from stageline_operator.planner.autoscaling import GroupLoad

_TIMEOUT_SECONDS: Final = 3.0

_log = logging.getLogger(__name__)


async def engine_loads(
    client: httpx.AsyncClient, cache: ObjectCache, key: ModelKey, incarnations: Mapping[int, int]
) -> Collection[GroupLoad]:
    """Loads of those of these groups, by index with their incarnation, whose engines answer."""
    pods = _engine_pods(cache, key, incarnations)
    answers = await asyncio.gather(*(_load_of(client, pod) for pod in pods))
    return [each for each in answers if each is not None]


def _engine_pods(cache: ObjectCache, key: ModelKey, incarnations: Mapping[int, int]) -> Iterator[Mapping[str, Any]]:
    wanted = {(str(group), str(incarnation)) for group, incarnation in incarnations.items()}
    for identity, pod in cache.of_model(key):
        own = pod["metadata"].get("labels") or {}
        life = (own.get(labels.GROUP), own.get(labels.INCARNATION))
        is_engine = identity.kind == "Pod" and own.get(labels.STAGE) == "0" and life in wanted
        if is_engine and is_owned(cache, pod) and pod.get("status", {}).get("podIP"):
            yield pod


async def _load_of(client: httpx.AsyncClient, pod: Mapping[str, Any]) -> GroupLoad | None:
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            said = EngineStatus.model_validate_json(await status_of(client, pod, ports.ENGINE_STATE))
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValidationError) as error:
        _log.debug("the engine in pod %s does not say its load: %s", pod["metadata"]["name"], error)
        return None
    if said.phase is not Phase.READY or not said.slots:
        return None
    return GroupLoad(
        running=said.requests_running,
        waiting=said.requests_waiting,
        slots=said.slots,
        kv_usage=said.kv_usage,
        longest_wait_seconds=said.longest_wait_seconds,
    )
