"""Keeps an observer up to date on one kind of object: lists it, watches from there, and resumes an ended watch.

Watches are short, so that a hanging connection is noticed: within `WATCH_SECONDS` the API server sends a bookmark and
ends the watch, or the client does. The next watch resumes from the last version without a list, also after a broken
connection or an overload. A full list follows an expired version, a permanent refusal, or an unreadable event. It also
follows `relist_seconds`, because a watch might miss an event.
"""

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from stageline_kubernetes.client import KubeApi, Listing
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.resources import ApiResource

WATCH_SECONDS: Final = 60
FIRST_RETRY_SECONDS: Final = 0.5
LONGEST_RETRY_SECONDS: Final = 15.0
LONGEST_RETRY_AFTER_SECONDS: Final = 10.0
"""Limit on the server's requested wait."""
SETTLE_SECONDS: Final = 1.0
"""How long a list request waits to be merged with others."""
_SHORT_WATCH_SECONDS: Final = 1.0
"""A watch that ends sooner is not reopened at once, and one that breaks sooner doesn't reset the back-off."""
_UNREADABLE: Final = (500, 502)
"""Errors of an open watch on an event that the server or the client can't read, and that would repeat."""


class Observer(Protocol):
    """Callbacks of a reflector. An exception of an observer ends the reflector."""

    def listed(self, listing: Listing) -> None:
        """All objects of the kind, replacing everything known."""

    def heard(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Changes since, in order; empty when a watch was opened or got a bookmark."""

    def failed(self, error: ApiError) -> None:
        """A list or a watch failed; it is retried."""


class Reflector:
    """Reflects one kind in one namespace (empty: all). `list_slots` limits concurrent lists of many reflectors.

    With `watches=False` it only lists, every `relist_seconds` and whenever `relist` is called.
    """

    def __init__(
        self,
        api: KubeApi,
        resource: ApiResource,
        namespace: str,
        selector: str,
        observer: Observer,
        relist_seconds: float,
        *,
        watches: bool = True,
        list_slots: asyncio.Semaphore | None = None,
    ) -> None:
        self._api = api
        self._what = (resource, namespace, selector)
        self._observer = observer
        self._relist_seconds = relist_seconds
        self._watches = watches
        self._list_slots = list_slots or contextlib.nullcontext()
        self._version: int | None = None
        """Version to resume from; None to list first."""
        self._list_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._opened_at: float | None = None
        """When the current watch was opened; None if none is open."""
        self._relist = asyncio.Event()

    def relist(self) -> None:
        """List now, unless it watches."""
        self._relist.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self._opened_at = None
            try:
                if self._version is None or self._now() >= self._list_at:
                    await self.list()
                await (self._watch(self._version) if self._watches else self._wait())
                self._retry_seconds = FIRST_RETRY_SECONDS
            except ApiError as error:
                await self._take_failure(error)

    async def _take_failure(self, error: ApiError) -> None:
        """Report it, drop the version if a watch from it would fail again, and back off."""
        is_open, has_version = self._opened_at is not None, self._version is not None
        if not error.is_passing or (is_open and error.status in _UNREADABLE):
            self._version = None
        if not (error.is_expired and has_version):  # for a watch it only means to list again
            self._observer.failed(error)
        if self._opened_at is not None and self._now() - self._opened_at >= _SHORT_WATCH_SECONDS:
            self._retry_seconds = FIRST_RETRY_SECONDS
        asked_seconds = min(error.retry_after_seconds or 0.0, LONGEST_RETRY_AFTER_SECONDS)
        await asyncio.sleep(max(self._retry_seconds * random.uniform(0.5, 1.0), asked_seconds))
        self._retry_seconds = min(LONGEST_RETRY_SECONDS, self._retry_seconds * 2)

    async def list(self) -> None:
        """Raises `ApiError`."""
        self._relist.clear()
        async with self._list_slots:
            listing = await self._api.list(*self._what)
        self._observer.listed(listing)
        self._version, self._list_at = listing.version, self._now() + self._relist_seconds

    async def _watch(self, version: int | None) -> None:
        assert version is not None, "nothing was listed"
        began = self._now()
        seconds = max(1, min(WATCH_SECONDS, round(self._list_at - began)))
        async with contextlib.aclosing(self._api.watch(*self._what, version, seconds)) as batches:
            async for events in batches:
                self._opened_at = self._now() if self._opened_at is None else self._opened_at
                self._observer.heard([each for each in events if each["type"] != "BOOKMARK"])
                version = self._version = max(version, *map(_version_of, events), 0)
        if self._now() - began < _SHORT_WATCH_SECONDS:
            await asyncio.sleep(FIRST_RETRY_SECONDS)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._list_at - self._now()):
                await self._relist.wait()
            await asyncio.sleep(SETTLE_SECONDS)
        self._list_at = self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _version_of(event: Mapping[str, Any]) -> int:
    """0 if the object has no version."""
    try:
        return int(event["object"]["metadata"]["resourceVersion"])
    except (KeyError, TypeError, ValueError):
        return 0
