"""The soak's users: some clients that ask one request after the other and judge every answer.

The answer that is due is the one that was given while nothing was disturbed. Only a gateway's own death excuses a
broken connection (nobody else holds the stream), and then the client asks again.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from chaos.soak_answers import Answer, Comparison, Judge, Token, what_is_missing
from chaos.soak_requests import Request

ANSWER_SECONDS: Final = 300.0
"""Longer than the gateway holds a request for a group that is made anew."""
MOST_PARTED_SHARE: Final = 0.02
"""Of the answers; more near ties than that would be a fault that hides behind rounding."""
_ROUTE: Final = "/v1/chat/completions"
_AFTER_A_BREAK_SECONDS: Final = 0.2


@dataclass(slots=True)
class Tally:
    """What came of the requests, by kind; `failures` says in words what was wrong."""

    answered: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    """An answer may be resumed more than once."""
    parted: int = 0
    broken_by_gateway: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def has_too_many_parted(self) -> bool:
        """Whether near ties are too common to be near ties."""
        return self.parted > max(4, MOST_PARTED_SHARE * self.answered.total())


@dataclass(slots=True)
class Traffic:
    """Clients of one gateway. `was_away` tells whether the gateway was dead in a span of `time.monotonic`."""

    url: str
    requests: Sequence[Request]
    ids: Mapping[Token, int]
    was_away: Callable[[float, float], bool]
    tally: Tally = field(default_factory=Tally)
    due: list[Answer] = field(default_factory=list)

    async def ask_undisturbed(self, at_once: int) -> list[str]:
        """Ask everything once and keep the answers as those that are due; returns what was wrong with them."""
        gate = asyncio.Semaphore(at_once)
        async with self._client() as client:

            async def one(request: Request) -> Answer:
                async with gate:
                    return await ask(client, request.body)

            self.due = await asyncio.gather(*(one(request) for request in self.requests))
        pairs = zip(self.requests, self.due, strict=True)
        return [f"{request.kind}: {wrong}" for request, answer in pairs if (wrong := _wrong_alone(request, answer))]

    async def ask_for(self, seconds: float, clients: int, rng: random.Random) -> None:
        """Ask for a while; returns when the last answer has ended."""
        until = time.monotonic() + seconds
        seeds = [rng.randrange(2**31) for _ in range(clients)]
        async with self._client() as client:
            await asyncio.gather(*(self._ask_until(client, until, random.Random(seed)) for seed in seeds))

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False)

    async def _ask_until(self, client: httpx.AsyncClient, until: float, rng: random.Random) -> None:
        while (began := time.monotonic()) < until:
            index = rng.randrange(len(self.requests))
            request = self.requests[index]
            answer = await ask(client, request.body, request.leave_after)
            if answer.lost_connection and self.was_away(began, time.monotonic()):
                self.tally.broken_by_gateway += 1
                await asyncio.sleep(_AFTER_A_BREAK_SECONDS)
            else:
                self.judge(index, answer)

    def judge(self, index: int, answer: Answer) -> None:
        """Count an answer to a request, and say what is wrong with it."""
        request, tally = self.requests[index], self.tally
        tally.answered[request.kind] += 1
        tally.resumed[request.kind] += bool(answer.resumes)
        tally.resumes += answer.resumes
        has_left = request.leave_after is not None and answer.num_tokens >= request.leave_after
        wrong = "" if has_left and not answer.problem else _wrong_alone(request, answer)
        if not wrong and not request.is_refused:
            compared = self._compare(index, answer, has_left)
            tally.parted += compared.parted
            wrong = compared.difference
        if wrong:
            tally.failures.append(f"request {index} ({request.kind}): {wrong}")

    def _compare(self, index: int, answer: Answer, has_left: bool) -> Comparison:
        body = self.requests[index].body
        judge = Judge(self.ids, body["temperature"], body["seed"])
        return judge.compare(self.due[index], answer, begun_only=has_left)


def _wrong_alone(request: Request, answer: Answer) -> str:
    if not request.is_refused:
        return what_is_missing(answer, request.choices)
    if not 400 <= answer.status < 500 or "error" not in answer.problem:
        return f"HTTP {answer.status} where a refusal was due: {answer.problem}"
    return ""


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any], leave_after: int | None = None) -> Answer:
    """Ask, and read the answer to its end or until so many tokens have come."""
    answer = Answer()
    try:
        async with client.stream("POST", _ROUTE, json=dict(body)) as response:
            answer.status = response.status_code
            if response.status_code != httpx.codes.OK:
                answer.problem = (await response.aread()).decode(errors="replace")
            elif body.get("stream"):
                async for line in response.aiter_lines():
                    answer.take_line(line)
                    if leave_after is not None and answer.num_tokens >= leave_after:
                        break
            else:
                answer.resumes = int(response.headers.get("x-stageline-resumed", 0))
                answer.take_whole(json.loads(await response.aread()))
    except httpx.HTTPError as error:
        answer.lost_connection = True
        answer.problem = repr(error)
    return answer
