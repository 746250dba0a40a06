"""Requests that arrive at an OpenAI server by a Poisson process, and the times of their streams.

Arrival times and prompts depend only on the seed, so that every server gets the same ones. A request is sent at its
time even if earlier ones are unanswered (an open loop): a slow server gets a queue, as with real users.
"""

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx

from stageline_api.errors import UserError
from stageline_bench.runtime.group.workload import Workload

ANSWER_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalLoad:
    """`requests` prompts of `input_tokens`, `rate` a second on average, each with `output_tokens` of output."""

    rate: float
    requests: int
    input_tokens: int
    output_tokens: int
    seed: int = 0

    def arrival_seconds(self) -> list[float]:
        """Seconds after the start; the first is at 0."""
        draw = random.Random(f"arrivals/{self.seed}")
        moments = [0.0]
        while len(moments) < self.requests:
            moments.append(moments[-1] + draw.expovariate(self.rate))
        return moments

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of each request's prompt."""
        sizes = {"requests": self.requests, "input_tokens": self.input_tokens, "output_tokens": self.output_tokens}
        return Workload(name="arrivals", seed=self.seed, **sizes).prompts(vocab_size)


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """One answer: seconds from sending to the first token, and from there to the last one."""

    first_token_seconds: float
    rest_seconds: float


async def play(url: str, model: str, load: ArrivalLoad, vocab_size: int) -> list[StreamTimes]:
    """Send every request at its time and read every stream to its end.

    Raises:
        UserError: an answer is an error, or has no token.
    """
    started = time.perf_counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False) as http:

        async def one(moment: float, prompt: list[int]) -> StreamTimes:
            await asyncio.sleep(max(0.0, started + moment - time.perf_counter()))
            return await _stream(http, _body(model, prompt, load.output_tokens))

        both = zip(load.arrival_seconds(), load.prompts(vocab_size), strict=True)
        # Not `gather`: after an error the other streams must end before the client closes, or their connections stay
        # open.
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(moment, prompt)) for moment, prompt in both]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


def _body(model: str, prompt: list[int], output_tokens: int) -> dict[str, Any]:
    """Greedy, with exactly the requested length."""
    body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
    return {**body, "ignore_eos": True, "stream": True}


async def _stream(http: httpx.AsyncClient, body: dict[str, Any]) -> StreamTimes:
    sent = time.perf_counter()
    first = last = None
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            words = (await answer.aread()).decode(errors="replace")[:300]
            raise UserError(f"the server answered with status {answer.status_code}: {words}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                last = time.perf_counter()
                first = first if first is not None else last
    if first is None or last is None:
        raise UserError("the server's answer held no token")
    return StreamTimes(first - sent, last - first)
