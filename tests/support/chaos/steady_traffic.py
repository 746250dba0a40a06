"""Clients that ask one after another without a pause, and remember every answer that was not whole."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

_ANSWER_SECONDS = 400.0
"""Longer than the gateway holds a request for a group that has to be made anew."""


@dataclass
class SteadyTraffic:
    """`failures` says in words what was wrong with an answer; `answers` counts the whole ones.

    `spans` are when each whole answer was asked for and when it ended, by `time.monotonic`.
    """

    url: str
    model: str
    max_tokens: int = 12
    asked: Mapping[str, Any] = field(default_factory=dict)
    """More fields of every request."""
    answers: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ending: threading.Event = field(default_factory=threading.Event)

    def ask_until_told(self, first_tokens: int) -> None:
        """One client, whose first answer may be shorter: its text is not kept then."""
        tokens = first_tokens
        with httpx.Client(base_url=self.url, timeout=_ANSWER_SECONDS, trust_env=False) as client:
            while not self._ending.is_set():
                began = time.monotonic()
                try:
                    text = self._ask(client, tokens)
                except (httpx.HTTPError, AssertionError, ValueError) as error:
                    with self._lock:
                        self.failures.append(f"{type(error).__name__}: {error}")
                else:
                    with self._lock:
                        self.answers += 1
                        self.spans.append((began, time.monotonic()))
                        if tokens == self.max_tokens:
                            self.texts.add(text)
                tokens = self.max_tokens

    def end(self) -> None:
        """Ask no more."""
        self._ending.set()

    def _ask(self, client: httpx.Client, max_tokens: int) -> str:
        """The text of one streamed answer; raises when it is not whole."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "the and in"}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            **self.asked,
        }
        pieces, finish, done = [], None, False
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise AssertionError(f"HTTP {response.status_code}: {response.text[:300]}")
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        pieces.append(choice["delta"].get("content") or "")
                        finish = choice["finish_reason"] or finish
        assert done, f"the stream ended early, after {''.join(pieces)!r}"
        assert finish in ("stop", "length"), finish
        return "".join(pieces)


@contextmanager
def steady_traffic(
    url: str, model: str, clients: int = 3, max_tokens: int = 12, **asked: Any
) -> Iterator[SteadyTraffic]:
    """Traffic for the length of the block; afterwards every answer has come or failed.

    Answers that begin together and go on in step would end together: the first ones are of different lengths, so that
    at every moment most are in the middle.
    """
    traffic = SteadyTraffic(url, model, max_tokens, asked)
    firsts = [max(1, max_tokens * (place + 1) // clients) for place in range(clients)]
    threads = [threading.Thread(target=traffic.ask_until_told, args=(first,), daemon=True) for first in firsts]
    for thread in threads:
        thread.start()
    try:
        yield traffic
    finally:
        traffic.end()
        for thread in threads:
            thread.join(timeout=_ANSWER_SECONDS + 10)
    assert not any(thread.is_alive() for thread in threads), "a client waits for ever"
