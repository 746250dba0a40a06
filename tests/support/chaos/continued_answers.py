"""One answer of nine tokens that any scripted engine can give from any token on, and what a client made of a stream.

The engines continue as the contract says: from the ids they are handed, with the text after the characters that were
relayed. What they answer depends on those alone, so a repeated or missing token shows.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from processes.scripted_engine import Say, Step
from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason, GenerateRequest, TokenLogprob

WORDS = ("In ", "the ", "beginning ", "there ", "was ", "a ", "pipe", "line", ".")
TEXT = "".join(WORDS)
LATE_CHARACTERS = 3
"""How far the engines' text lags behind their ids."""


def rest_of(request: GenerateRequest, ending: Step | None = None, after: int = len(WORDS)) -> list[Step]:
    """What comes after what was generated, up to `after` tokens in all; then `ending`, or the end."""
    start = len(request.generated_token_ids)
    assert request.generated_token_ids == tuple(range(start)), request.generated_token_ids
    steps: list[Step] = [Say(Admitted(prompt_tokens=3))]
    sent = request.generated_characters or 0
    for index in range(start, after):
        released = max(0, len("".join(WORDS[: index + 1])) - LATE_CHARACTERS)
        logprob = TokenLogprob(token_id=index, bytes=tuple(WORDS[index].encode()), logprob=-index, top_logprobs=())
        steps.append(Say(Delta(text=TEXT[sent:released], token_ids=(index,), logprobs=(logprob,))))
        sent = max(sent, released)
    if ending is not None:
        return [*steps, ending]
    end = Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=len(WORDS))
    return [*steps, Say(Delta(text=TEXT[sent:], token_ids=())), Say(end)]


@dataclass
class Streamed:
    """What a client made of a stream."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    is_done: bool = False


def read(body: str) -> Streamed:
    """A whole stream of one choice."""
    seen = Streamed()
    for block in body.split("\n\n"):
        if block.startswith(":"):
            seen.comments.append(block[2:])
        elif block == "data: [DONE]":
            seen.is_done = True
        elif block:
            event = json.loads(block.removeprefix("data: "))
            seen.errors += [event["error"]] if "error" in event else []
            seen.usage = event.get("usage") or seen.usage
            for choice in event.get("choices", []):
                seen.text += choice["text"]
                seen.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                seen.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    return seen


def begun(parts: Iterator[str]) -> str:
    """What a stream said up to its first token, which it has relayed then: a test may disturb the answer after that."""
    body = ""
    while "data: " not in body:
        body += next(parts)
    return body
