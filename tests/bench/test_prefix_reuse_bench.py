"""Chats that are played to measure prefix caches: what is sent again, what is new, what is counted."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from typing import Any

import pytest

from processes.loopback_server import served
from stageline_api.errors import UserError
from stageline_bench.runtime.prefix_reuse import (
    CHATS,
    SHARED,
    ChatAnswer,
    ChatLoad,
    chat_loads,
    play_chats,
    reuse_figures,
    reuse_targets,
)


def same_words(one: list[str], other: list[str]) -> int:
    """How many words both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class CachingServer(ThreadingHTTPServer):
    """Takes words for tokens, and has the beginnings of all earlier prompts and answers cached."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.lock = threading.Lock()
        self.chats: list[list[dict[str, str]]] = []
        self.known: list[list[str]] = []

    def take(self, chat: list[dict[str, str]]) -> tuple[str, int, int]:
        """An answer nobody else gets, the prompt's words, and how many of these were known."""
        words = [word for message in chat for word in (message["role"], *message["content"].split())]
        with self.lock:
            cached = max((same_words(known, words) for known in self.known), default=0)
            answer = f"answer {len(self.chats)}"
            self.chats.append(chat)
            self.known.append([*words, "assistant", *answer.split()])
        return answer, len(words), cached


class _Handler(BaseHTTPRequestHandler):
    server: CachingServer

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream_options"] == {"include_usage": True}
        text, prompt, cached = self.server.take(body["messages"])
        self.send_response(self.server.status)
        self.end_headers()
        details = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
        events = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            *({"choices": [{"delta": {"content": piece}}]} for piece in (text[:3], text[3:])),
            {"choices": [], "usage": details},
        ]
        self.wfile.write(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Nothing."""


def played(load: ChatLoad) -> tuple[list[ChatAnswer], list[list[dict[str, str]]]]:
    with CachingServer() as server, served(server) as url:
        return asyncio.run(play_chats(url, load)), server.chats


def test_questions_behind_one_system_prompt_share_that_alone() -> None:
    load = ChatLoad(name=SHARED, people=2, turns=3, system_words=50, shares_system=True)
    answers, chats = played(load)
    assert [[message["role"] for message in chat] for chat in chats] == [["system", "user"]] * 6
    assert len({chat[0]["content"] for chat in chats}) == 1
    assert len({chat[1]["content"] for chat in chats}) == 6
    assert sorted(answer.cached_tokens >= 51 for answer in answers) == [False, *[True] * 5]


def test_a_chat_goes_on_with_the_answers_that_it_got() -> None:
    load = ChatLoad(name=CHATS, people=2, turns=3, system_words=10, shares_system=False)
    answers, chats = played(load)
    assert sorted(len(chat) for chat in chats) == [2, 2, 4, 4, 6, 6]
    for chat in (chat for chat in chats if len(chat) == 6):
        assert chat[:4] in chats
        assert chat[2]["content"] in {answer.text for answer in answers}
    later = [answer for answer in answers if answer.cached_tokens > 20]
    assert len(later) == 4, "all that went before is known from the second question on"


def test_loads_of_another_seed_say_nothing_that_was_said() -> None:
    for one, other in zip(chat_loads(0), chat_loads(1), strict=True):
        assert one.system_of(0) != other.system_of(0)
        assert one.question(0, 0) != other.question(0, 0)


def test_an_error_is_told() -> None:
    with CachingServer(status=503) as server, served(server) as url, pytest.raises(UserError, match="status 503"):
        asyncio.run(play_chats(url, chat_loads(0)[0]))


def test_shares_are_of_all_prompt_tokens_and_pairs_are_of_one_start() -> None:
    figures = reuse_figures([ChatAnswer("", 0.1, 100, 80), ChatAnswer("", 0.3, 300, 0)])
    assert (figures["hit_ratio"], figures["mean_ttft_seconds"]) == (0.2, 0.2)
    measured = [
        {"engine": engine, "load": load, "hit_ratio": hits, "mean_ttft_seconds": seconds}
        for load in (SHARED, CHATS)
        for engine, hits, seconds in (("stageline", 0.8, 0.1), ("vllm", 0.7, 0.2))
    ]
    assert [target.measured for target in reuse_targets(measured)] == [0.1, 0.5] * 2
