"""Which watches run, told from the answers to the very requests that open them.

kopf opens a stream again as soon as it ends. So a watch runs from the moment its request is answered until a later
request for the same resource is refused or gets no answer, or kopf itself ends. A gap that is shorter than kopf's
start after a failure is forgiven, so that a reconnection is no news; a watch that never ran is not.
"""

import math
from collections.abc import Callable, Collection
from typing import Final

import aiohttp

_FORGIVEN_SECONDS: Final = 30.0
"""Longer than the longest wait before kopf is started again, and its start."""

OnAnswer = Callable[[str, bool], None]
"""Called with the path that was asked, and whether a watch of it began (else it is broken)."""


class RunningWatches:
    """One watch for each path of `paths`. Times are of one monotonic clock."""

    def __init__(self, paths: Collection[str]) -> None:
        self._broken_since: dict[str, float | None] = dict.fromkeys(paths, -math.inf)
        """None while it runs."""

    def began(self, path: str) -> None:
        """The API server answered the request for this watch."""
        if path in self._broken_since:
            self._broken_since[path] = None

    def broke(self, path: str, now: float) -> None:
        """A request for this resource was refused or got no answer."""
        if path in self._broken_since and self._broken_since[path] is None:
            self._broken_since[path] = now

    def all_broke(self, now: float) -> None:
        """kopf has ended, and every watch with it."""
        for path in self._broken_since:
            self.broke(path, now)

    def problem(self, now: float) -> str:
        """Which watch does not run, and since when; empty when all run or are about to."""
        broken = {path: since for path, since in self._broken_since.items() if since is not None}
        path, since = min(broken.items(), key=lambda each: each[1], default=("", now))
        if now - since <= _FORGIVEN_SECONDS:
            return ""
        how_long = "has not begun" if since == -math.inf else f"has not run for {now - since:.0f} s"
        others = f", nor {len(broken) - 1} more" if len(broken) > 1 else ""
        return f"the watch of {path} {how_long}{others}; the log says why"


def watch_trace_config(on_answer: OnAnswer) -> aiohttp.TraceConfig:
    """What makes an HTTP session tell how its requests were answered."""

    async def answered(_: aiohttp.ClientSession, __: object, end: aiohttp.TraceRequestEndParams) -> None:
        if not end.response.ok:
            on_answer(end.url.path, False)
        elif end.url.query.get("watch") == "true":
            on_answer(end.url.path, True)

    async def failed(_: aiohttp.ClientSession, __: object, end: aiohttp.TraceRequestExceptionParams) -> None:
        on_answer(end.url.path, False)

    told = aiohttp.TraceConfig()
    told.on_request_end.append(answered)
    told.on_request_exception.append(failed)
    return told
