"""The stand-in's scheduler: which requests get a token in a step, and what the step's token ends.

Continuous batching in its plainest form: all running requests in each step, first come first served by priority.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes.fake_vllm.tokens import logprobs_of, next_token

BLOCK_TOKENS = 16


@dataclass
class Request:
    request_id: str
    token_ids: list[int]
    sampling: Mapping[str, Any]
    max_tokens: int
    stop_token_ids: frozenset[int]
    priority: int = 0
    adapter: str | None = None
    num_prompt: int = 0
    num_cached: int = 0
    draws: int = 0
    chunks: asyncio.Queue[dict[str, Any] | None] = field(default_factory=asyncio.Queue)
    """Choices as the wire has them; None when the engine is dead."""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def is_prefill(self) -> bool:
        return self.draws == 0


class Scheduler:
    def __init__(self, max_num_seqs: int, vocabulary: int, model_dir: Path | None = None) -> None:
        self._max_num_seqs = max_num_seqs
        self.vocabulary = vocabulary
        self._model_dir = model_dir
        self._seen_beginnings: set[tuple[int, ...]] = set()
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.has_work = asyncio.Event()

    def add(self, request: Request) -> None:
        self._look_up(request)
        self.waiting.append(request)
        self.waiting.sort(key=lambda one: one.priority)
        self.has_work.set()

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last chunk without tokens."""
        for queue in (self.waiting, self.running):
            for request in [one for one in queue if one.request_id == request_id]:
                queue.remove(request)
                request.chunks.put_nowait(_choice([], "abort"))

    def _look_up(self, request: Request) -> None:
        """Whole blocks of its beginning that an earlier request had, all but the last token."""
        ends = range(BLOCK_TOKENS, request.num_prompt, BLOCK_TOKENS)
        beginnings = [tuple(request.token_ids[:end]) for end in ends]
        request.num_cached = BLOCK_TOKENS * sum(each in self._seen_beginnings for each in beginnings)
        self._seen_beginnings.update(beginnings)
        self.prefix_queries += request.num_prompt
        self.prefix_hits += request.num_cached

    def begin_step(self) -> list[Request]:
        """The rows of the next step."""
        while self.waiting and len(self.running) < self._max_num_seqs:
            self.running.append(self.waiting.pop(0))
        if not self.running:
            self.has_work.clear()
        return list(self.running)

    def end_step(self, rows: list[Request], is_shifted: bool = False) -> None:
        """Each row gets its token, or that of another one."""
        self.steps += 1
        for request in rows:
            if request in self.running:  # it may have been aborted meanwhile
                self._deliver(request, is_shifted)

    def _deliver(self, request: Request, is_shifted: bool) -> None:
        if request.is_prefill:
            self.prompt_tokens += request.num_prompt
        token = next_token(
            request.token_ids, request.sampling, draws=request.draws, vocabulary=self.vocabulary,
            adapter=request.adapter, model_dir=self._model_dir,
        )  # fmt: skip
        token = (token + is_shifted) % self.vocabulary
        request.token_ids.append(token)
        request.draws += 1
        self.generation_tokens += 1
        asked = request.sampling.get("logprobs")
        logprobs = None if asked is None else {"content": [logprobs_of(token, asked, self.vocabulary)]}
        ends = "stop" if token in request.stop_token_ids else "length" if request.draws >= request.max_tokens else None
        if ends:
            self.running.remove(request)
        request.chunks.put_nowait(_choice([token], ends, logprobs))

    def fail_all(self) -> None:
        for request in (*self.running, *self.waiting):
            request.chunks.put_nowait(None)
        self.running, self.waiting = [], []


def _choice(token_ids: list[int], reason: str | None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": 0, "finish_reason": reason, "stop_reason": None, "token_ids": token_ids, "logprobs": logprobs}
