"""A queue of keys to reconcile: each key at most once, never two passes of one key at a time.

Changes within a short time share one pass. The wait of a failing key grows. Belongs to one event loop.
"""

import asyncio
import random
from collections import deque
from typing import Final

from stageline_operator.controller.client.resources import ModelKey

GATHER_SECONDS: Final = 0.05
"""How long a change waits for others of the same model: pods change in groups."""
FIRST_RETRY_SECONDS: Final = 0.5
LONGEST_RETRY_SECONDS: Final = 60.0


class WorkQueue:
    """Keys that are due, keys with a timer, and keys that a worker holds."""

    def __init__(self) -> None:
        self._due: deque[ModelKey] = deque()
        self._timers: dict[ModelKey, asyncio.TimerHandle] = {}
        self._at_work: set[ModelKey] = set()
        self._again: dict[ModelKey, float] = {}
        """Keys that changed during their pass, with the requested wait."""
        self._failures: dict[ModelKey, int] = {}
        self._available = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: ModelKey) -> None:
        """Queue `key` because it changed."""
        self.add_after(key, GATHER_SECONDS)

    def add_after(self, key: ModelKey, seconds: float) -> None:
        """Queue `key` after `seconds`, or sooner if that was requested before."""
        if key in self._at_work:
            self._again[key] = min(seconds, self._again.get(key, seconds))
            return
        if key in self._due:
            return
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(max(0.0, seconds), self._make_due, key)

    async def get(self) -> ModelKey:
        """Wait for a due key and hold it until `finish` or `fail`."""
        while not self._due:
            self._available.clear()
            await self._available.wait()
        key = self._due.popleft()
        self._at_work.add(key)
        return key

    def finish(self, key: ModelKey, again_after_seconds: float | None = None) -> None:
        """The pass succeeded; requeue after that time, or on a change."""
        self._failures.pop(key, None)
        self._give_back(key, again_after_seconds)

    def fail(self, key: ModelKey, retry_after_seconds: float | None = None) -> float:
        """The pass failed: retry after twice the last wait, or as the API server asked; returns the wait."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        longest = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(failures, 10))
        # Jittered, so that not all keys are retried at the same time after an outage.
        seconds: float = max(retry_after_seconds or 0.0, longest * random.uniform(0.5, 1.0))
        self._again.pop(key, None)  # a change does not shorten the wait: the pass would fail again
        self._give_back(key, seconds)
        return seconds

    def forget(self, key: ModelKey) -> None:
        self._failures.pop(key, None)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def clear(self) -> None:
        """Drop all waiting keys when this replica stops leading; workers still finish the keys that they hold."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._due.clear()
        self._failures.clear()

    def _give_back(self, key: ModelKey, seconds: float | None) -> None:
        self._at_work.discard(key)
        asked = self._again.pop(key, None)
        waits = [each for each in (seconds, asked) if each is not None]
        if waits:
            self.add_after(key, min(waits))

    def _make_due(self, key: ModelKey) -> None:
        self._timers.pop(key, None)
        self._due.append(key)
        self._available.set()
