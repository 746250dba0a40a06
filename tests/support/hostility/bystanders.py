"""Clients that stream answers without end and clock the gaps between tokens.

A gap counts by when it ended. That of an answer's first token is none: it has a queue of its own to wait in.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from hostility.repeated_parts import COMPLETIONS
from processes.gateway_harness import MODEL

TOKENS: Final = 4_000
BEGUN_TOKENS: Final = 100
BEGIN_SECONDS: Final = 120.0
_KEPT: Final = 200_000


@dataclass(slots=True)
class Bystander:
    """Call `start`, read `largest_gap`, call `stop`."""

    url: str
    seed: int
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    _gaps: list[tuple[float, float]] = field(default_factory=list)
    _last: float | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(120)

    def largest_gap(self, since: float) -> float:
        """Seconds; of gaps that ended since then, and of the one that lasts, by the monotonic clock."""
        last = self._last
        lasting = 0.0 if last is None else time.monotonic() - last
        # From the newest back: there may be a hundred thousand.
        found = lasting
        for at, gap in reversed(self._gaps):
            if at < since:
                break
            found = max(found, gap)
        return found

    def _run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=120, trust_env=False) as http:
            while not self._stopping.is_set():
                try:
                    self._read_one(http)
                except httpx.HTTPError as error:
                    self.failures.append(f"a bystander's answer broke: {type(error).__name__} {error}")
                    self._stopping.wait(1)
                finally:
                    self._last = None

    def _read_one(self, http: httpx.Client) -> None:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": f"bystander {self.seed}",
            "max_tokens": TOKENS,
            "stream": True,
        }
        body |= {"ignore_eos": True, "temperature": 1.0, "seed": self.seed}
        with http.stream("POST", COMPLETIONS, json=body) as answer:
            if not answer.is_success:
                self.failures.append(f"a bystander was refused: {answer.status_code} {answer.read()[:200]!r}")
                self._stopping.wait(1)
                return
            for _ in answer.iter_raw():
                self._hear(time.monotonic())
                if self._stopping.is_set():
                    return

    def _hear(self, now: float) -> None:
        if self._last is not None:
            self._gaps.append((now, now - self._last))
            if len(self._gaps) > 2 * _KEPT:
                del self._gaps[:_KEPT]
        self._last = now
        self.tokens += 1


@contextmanager
def bystanders(url: str, failures: list[str], count: int = 2) -> Iterator[Sequence[Bystander]]:
    """So many of them, all of which have begun to hear tokens; `failures` gets what went wrong for them in the end."""
    watching = [Bystander(url, seed) for seed in range(count)]
    for each in watching:
        each.start()
    try:
        deadline = time.monotonic() + BEGIN_SECONDS
        while any(each.tokens < BEGUN_TOKENS for each in watching):
            assert time.monotonic() < deadline, [(each.tokens, each.failures) for each in watching]
            time.sleep(0.01)
        yield watching
    finally:
        for each in watching:
            each.stop()
            failures += each.failures
