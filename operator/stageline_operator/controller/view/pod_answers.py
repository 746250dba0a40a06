"""Answers of pods that are polled, and when to ask each again: with growing waits.

Kept by uid, so that a pod never inherits the answer of an earlier pod of its name. Belongs to one event loop, whose
clock it reads.
"""

import asyncio
from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.view.object_cache import ObjectCache

Answer = TypeVar("Answer")


class PodAnswers(Generic[Answer]):
    """Answers by uid. A pod is asked first when it has been known for `patience_seconds`."""

    def __init__(
        self,
        cache: ObjectCache,
        *,
        wait_seconds: float,
        growth: float,
        longest_wait_seconds: float,
        patience_seconds: float = 0.0,
    ) -> None:
        self.by_uid: dict[str, Answer] = {}
        self._cache = cache
        self._wait_seconds = wait_seconds
        self._growth = growth
        self._longest_wait_seconds = longest_wait_seconds
        self._patience_seconds = patience_seconds
        self._waits: dict[str, tuple[float, float]] = {}
        """By uid: when to ask again, and how long to wait after that."""

    def of_model(self, key: ModelKey) -> Mapping[str, Answer]:
        """Answers by pod name, of one model."""
        pods = (manifest["metadata"] for identity, manifest in self._cache.of_model(key) if identity.kind == "Pod")
        return {pod["name"]: self.by_uid[pod["uid"]] for pod in pods if pod.get("uid") in self.by_uid}

    def keep(self, uids: Collection[str]) -> None:
        """Forget all pods but these."""
        self.by_uid = {uid: answer for uid, answer in self.by_uid.items() if uid in uids}
        self._waits = {uid: wait for uid, wait in self._waits.items() if uid in uids}

    def is_due(self, uid: str) -> bool:
        now = asyncio.get_running_loop().time()
        return self._waits.setdefault(uid, (now + self._patience_seconds, self._wait_seconds))[0] <= now

    def wait_longer(self, uid: str) -> None:
        """Schedule the next time to ask a pod, with a wait that grows."""
        _, seconds = self._waits.get(uid, (0.0, self._wait_seconds))
        longer = min(self._longest_wait_seconds, seconds * self._growth)
        self._waits[uid] = (asyncio.get_running_loop().time() + seconds, longer)
