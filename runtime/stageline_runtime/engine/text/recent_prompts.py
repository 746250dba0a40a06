"""Caches the last few rendered prompts: the choices of one request send the same prompt in separate requests.

Kept for seconds only: a template may write the time of day.
"""

import json
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from stageline_api.engine_http import Prompt

MAX_KEPT: Final = 4
"""Each is a prompt, its text and its ids: a few megabytes at most."""
KEPT_SECONDS: Final = 10.0
Made = TypeVar("Made")


def written(prompt: Prompt) -> str:
    """The text that a prompt is compared by. Python takes true for 1, 1 for 1.0, and objects in any order for equal."""
    return json.dumps(msgspec.to_builtins(prompt))


class RecentPrompts(Generic[Made]):
    """Safe from any thread. Two threads that ask for a new prompt at once may both make it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, str, Made]] = deque(maxlen=MAX_KEPT)

    def made_of(self, written: str, make: Callable[[], Made]) -> Made:
        """The cached result of `make` for the same text `written`, or a new one. Raises the errors of `make`."""
        if (known := self._find(written)) is not None:
            return known[0]
        made = make()
        self._kept.appendleft((time.monotonic(), written, made))
        return made

    def _find(self, written: str) -> tuple[Made] | None:
        oldest = time.monotonic() - KEPT_SECONDS
        for made_at, known, made in tuple(self._kept):
            if made_at >= oldest and known == written:
                return (made,)
        return None
