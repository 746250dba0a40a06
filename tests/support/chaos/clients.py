"""Clients that stream many answers at once, and what each of them saw: tokens, scores, text, usage, how it ended."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

DEADLINE_SECONDS = 420.0
"""Longest silence between two events; more than the gateway's own patience, which has more to say."""


@dataclass
class Seen:
    """One streamed answer as its client saw it."""

    tokens: list[tuple[int, ...]] = field(default_factory=list)
    """The bytes of each token."""
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finishes: list[str] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    is_done: bool = False
    problem: str = ""
    """A status, an error event or a broken connection."""

    def take(self, line: str) -> int:
        """Account for one line of the stream; returns how many tokens it brought."""
        if line == "data: [DONE]":
            self.is_done = True
        if not line.startswith("data: {"):
            return 0
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            self.problem = json.dumps(chunk["error"])
            return 0
        self.usage = chunk.get("usage") or self.usage
        count = 0
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                self.tokens.append(tuple(entry["bytes"]))
                self.logprobs.append(entry["logprob"])
                count += 1
        return count


async def stream_all(
    url: str, bodies: Sequence[dict[str, Any]], at_once: int, on_tokens: Callable[[int], None] = lambda _: None
) -> list[Seen]:
    """Stream all answers, `at_once` at a time; no request is ever sent a second time."""
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_SECONDS, limits=limits, trust_env=False) as client:

        async def one(body: dict[str, Any]) -> Seen:
            async with gate:
                return await _stream(client, body, on_tokens)

        return await asyncio.gather(*(one(body) for body in bodies))


@dataclass
class Traffic:
    """Answers that are being streamed in a thread, so that a test can disturb them meanwhile."""

    tokens: int = 0
    """That all clients have seen so far."""
    _answers: Future[list[Seen]] = field(default_factory=Future)

    def count(self, tokens: int) -> None:
        """Tokens were relayed."""
        self.tokens += tokens

    @property
    def is_over(self) -> bool:
        """Whether every answer has ended."""
        return self._answers.done()

    def answers(self) -> list[Seen]:
        """All answers, once they have ended."""
        return self._answers.result()

    def start(self, pool: ThreadPoolExecutor, url: str, bodies: Sequence[dict[str, Any]]) -> None:
        """Ask for all of them at once."""
        self._answers = pool.submit(lambda: asyncio.run(stream_all(url, bodies, len(bodies), self.count)))


@contextmanager
def streaming(url: str, bodies: Sequence[dict[str, Any]]) -> Iterator[Traffic]:
    """All answers at once; the block's end waits for theirs."""
    traffic = Traffic()
    with ThreadPoolExecutor(1) as pool:
        traffic.start(pool, url, bodies)
        yield traffic


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], on_tokens: Callable[[int], None]) -> Seen:
    seen = Seen()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                seen.problem = f"{answer.status_code}: {(await answer.aread()).decode()}"
                return seen
            async for line in answer.aiter_lines():
                if count := seen.take(line):
                    on_tokens(count)
    except httpx.HTTPError as error:
        seen.problem = repr(error)
    return seen
