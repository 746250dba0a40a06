"""`bench prefix-reuse`: savings of both servers' prefix caches on the same chats, starts interleaved.

Two kinds of load, as text over `/v1/chat/completions`, so that each server uses its own template and tokenizer. *Shared
system prompt*: many users ask one question each after the same long instructions. *Multi-turn chat*: each of several
users continues an own chat, which is sent whole every time, with the server's own answers. Each user waits for an
answer before the next question (a closed loop). The share of cached prompt tokens is each server's own count, in
`usage`; TTFT is the client's.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any, Final

import httpx

from stageline_api.errors import UserError
from stageline_bench.runtime.peers.served_engines import ENGINES, MODEL_NAME, Servers
from stageline_bench.runtime.record.results import Result, Target, this_machine, today

ANSWER_SECONDS: Final = 300.0
SHARED, CHATS = "shared system prompt", "multi-turn chat"
_WORDS: Final = (
    "river", "stone", "market", "winter", "garden", "letter", "engine", "bridge", "summer", "island", "window",
    "candle", "forest", "mirror", "silver", "harbor", "village", "morning", "thunder", "pocket", "ladder", "copper",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLoad:
    """`people` at once, each with `turns` questions of `question_words` after `system_words` of instructions."""

    name: str
    people: int
    turns: int
    system_words: int
    shares_system: bool
    question_words: int = 16
    answer_tokens: int = 24
    seed: int = 0

    def system_of(self, person: int) -> str:
        """The instructions: the same for all users, or each user's own."""
        draw = random.Random(f"{self.name}/{self.seed}/{'all' if self.shares_system else person}")
        return " ".join(draw.choices(_WORDS, k=self.system_words))

    def question(self, person: int, turn: int) -> str:
        draw = random.Random(f"{self.name}/{self.seed}/{person}/{turn}")
        return " ".join(draw.choices(_WORDS, k=self.question_words))


def chat_loads(seed: int) -> tuple[ChatLoad, ChatLoad]:
    """Both kinds, with different texts for each seed, so that no cache contains them."""
    return (
        ChatLoad(name=SHARED, people=4, turns=8, system_words=160, shares_system=True, seed=seed),
        ChatLoad(name=CHATS, people=4, turns=5, system_words=60, shares_system=False, seed=seed),
    )


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The measurements of one answer."""

    text: str
    first_token_seconds: float
    prompt_tokens: int
    cached_tokens: int


async def play_chats(url: str, load: ChatLoad) -> list[ChatAnswer]:
    """All answers, user by user.

    Raises:
        UserError: an answer is an error, has no token, or doesn't report cached tokens.
    """
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, trust_env=False) as http:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_person(http, load, person)) for person in range(load.people)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return [answer for task in tasks for answer in task.result()]


async def _person(http: httpx.AsyncClient, load: ChatLoad, person: int) -> list[ChatAnswer]:
    system = {"role": "system", "content": load.system_of(person)}
    chat = [system]
    answers: list[ChatAnswer] = []
    for turn in range(load.turns):
        if load.shares_system:
            chat = [system]
        chat.append({"role": "user", "content": load.question(person, turn)})
        answers.append(await _ask(http, chat, load.answer_tokens))
        chat.append({"role": "assistant", "content": answers[-1].text})
    return answers


async def _ask(http: httpx.AsyncClient, chat: list[dict[str, str]], answer_tokens: int) -> ChatAnswer:
    body: dict[str, Any] = {"model": MODEL_NAME, "messages": chat, "max_tokens": answer_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    sent, first, text, usage = time.perf_counter(), None, "", None
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            words = (await answer.aread()).decode(errors="replace")[:300]
            raise UserError(f"the server answered with status {answer.status_code}: {words}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first if first is not None else time.perf_counter()
                    text += piece
    if first is None or usage is None:
        raise UserError("the server's answer held no token, or no usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return ChatAnswer(text, first - sent, usage["prompt_tokens"], cached)


def run_prefix_reuse(servers: Servers, *, starts: int, say: Callable[[str], None]) -> Result:
    """Measure; the first server alternates between starts."""
    machine = this_machine()
    measured: list[dict[str, Any]] = []
    for start in range(starts):
        for engine in ENGINES if start % 2 == 0 else reversed(ENGINES):
            with servers.running(engine) as url:
                for load in chat_loads(-1 - start):
                    asyncio.run(play_chats(url, load))  # warm up compilation and first-use allocations
                for load in chat_loads(start):
                    figures = reuse_figures(asyncio.run(play_chats(url, load)))
                    measured.append({"start": start, "engine": engine, "load": load.name, **figures})
                    say(
                        f"start {start + 1}/{starts}, {engine}, {load.name}: {figures['hit_ratio']:.0%} of the prompts "
                        f"from the cache, TTFT mean {figures['mean_ttft_seconds'] * 1e3:.0f} ms"
                    )
    return Result(
        program="prefix-reuse",
        date=today(),
        machine=machine,
        parameters=servers.parameters(starts) | {load.name: _words_of(load) for load in chat_loads(0)},
        rounds=measured,
        targets=reuse_targets(measured),
    )


def reuse_figures(answers: Sequence[ChatAnswer]) -> dict[str, float]:
    """The share of prompt tokens from the cache, and TTFT in seconds."""
    first = [answer.first_token_seconds for answer in answers]
    hits = sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)
    values = {
        "hit_ratio": hits,
        "mean_ttft_seconds": mean(first),
        "p99_ttft_seconds": quantiles(first, n=100, method="inclusive")[98],
    }
    return {name: round(value, 5) for name, value in values.items()}


def reuse_targets(measured: Sequence[dict[str, Any]]) -> list[Target]:
    """Stageline over vLLM, medians of starts: at least as many cached tokens, and no later first token."""
    targets = []
    for load in (SHARED, CHATS):
        ours, theirs = (
            [one for one in measured if one["engine"] == engine and one["load"] == load] for engine in ENGINES
        )
        pairs = list(zip(ours, theirs, strict=True))
        hits = median(one["hit_ratio"] - other["hit_ratio"] for one, other in pairs)
        first = median(one["mean_ttft_seconds"] / other["mean_ttft_seconds"] for one, other in pairs)
        targets += [
            Target(name=f"{load}: share from the cache, Stageline - vLLM", measured=round(hits, 3), at_least=0.0),
            Target(name=f"{load}: mean TTFT, Stageline / vLLM", measured=round(first, 3), at_most=1.0),
        ]
    return targets


def _words_of(load: ChatLoad) -> str:
    system = f"{load.system_words} words of instructions, {'shared' if load.shares_system else 'their own'}"
    asks = f"{load.turns} questions of {load.question_words} words, answers of {load.answer_tokens} tokens"
    return f"{load.people} people at once, {system}; {asks}"
