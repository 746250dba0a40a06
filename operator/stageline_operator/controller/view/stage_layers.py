"""Which layers each stage holds: the engine decides, stages say so at their health endpoint, once they have loaded.

Asked by HTTP like any client, and only until it is known; a stage that does not answer yet is asked again. Anybody who
may make pods can label one and answer anything, so only pods that a PipelineModel owns are asked.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import httpx
from pydantic import ValidationError

from stageline_api import ports
from stageline_api.health import StageStatus
from stageline_operator.controller.client.resources import ModelKey, model_key_of
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.pod_answers import PodAnswers
from stageline_operator.controller.view.pod_status import is_owned, status_of

_POLL_SECONDS: Final = 2.0
_TIMEOUT_SECONDS: Final = 3.0
_AT_ONCE: Final = 16
_LONGEST_WAIT_SECONDS: Final = 60.0

_log = logging.getLogger(__name__)


class StageLayers:
    """The layers that each stage reports, by uid of its pod."""

    def __init__(self, cache: ObjectCache, on_known: Callable[[ModelKey], None]) -> None:
        self._cache = cache
        self._on_known = on_known
        # A pod of a person's own image may never answer, and a big model takes long to load.
        self._layers = PodAnswers[str](
            cache, wait_seconds=_POLL_SECONDS, growth=1.3, longest_wait_seconds=_LONGEST_WAIT_SECONDS
        )

    def known(self, key: ModelKey) -> Mapping[str, str]:
        """Layers by pod name, of one model."""
        return self._layers.of_model(key)

    async def run(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_SECONDS) as client:
            while True:
                waiting = list(self._running_pods())
                for start in range(0, len(waiting), _AT_ONCE):
                    await asyncio.gather(*(self._ask(client, pod) for pod in waiting[start : start + _AT_ONCE]))
                await asyncio.sleep(_POLL_SECONDS)

    def _running_pods(self) -> Iterator[Mapping[str, Any]]:
        """Running pods that are due to be asked; forgets the answers of pods that are gone."""
        pods = [manifest for _, manifest in self._cache.of_kind("Pod")]
        self._layers.keep({pod["metadata"].get("uid") for pod in pods})
        for pod in pods:
            status, uid = pod.get("status", {}), pod["metadata"].get("uid")
            may_answer = status.get("phase") == "Running" and status.get("podIP")
            if (
                may_answer
                and is_owned(self._cache, pod)
                and uid not in self._layers.by_uid
                and self._layers.is_due(uid)
            ):
                yield pod

    async def _ask(self, client: httpx.AsyncClient, pod: Mapping[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                body = await status_of(client, pod, ports.STAGE_HEALTH)
            said = StageStatus.model_validate_json(body)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValidationError) as error:
            _log.debug("stage %s does not say its layers yet: %s", pod["metadata"]["name"], error)
            self._layers.wait_longer(uid)
            return
        key = model_key_of(pod)
        if said.layers is None:
            self._layers.wait_longer(uid)
        elif key is not None:
            self._layers.by_uid[uid] = f"{said.layers.first}-{said.layers.last}"
            self._on_known(key)
