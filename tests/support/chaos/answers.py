"""The requests of the chaos tests, and whether their answers are what they would have been undisturbed.

Every other request is greedy, the rest are drawn with a seed. Answers are compared token for token. They may differ in
a near tie alone (`token_scores`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from chaos.clients import Seen
from oracles.token_scores import NEAR_TIE, Parting, ids_by_bytes

MOST_NEAR_TIES: Final = 4
"""Answers that may part at a near tie; more would be a fault that hides behind rounding."""


def request(index: int, tokens: int, content: str) -> dict[str, Any]:
    """One streamed chat of exactly so many tokens; odd ones are drawn with a seed."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "temperature": float(index % 2),
        "seed": 1000 + index,
        "max_tokens": tokens,
        "ignore_eos": True,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def incomplete(bodies: Sequence[dict[str, Any]], answers: Sequence[Seen]) -> dict[int, str]:
    """By its index, what is wrong with each answer that is not all there."""
    found = {index: _missing(body["max_tokens"], seen) for index, (body, seen) in enumerate(_pairs(bodies, answers))}
    return {index: text for index, text in found.items() if text}


def different(
    bodies: Sequence[dict[str, Any]], undisturbed: Sequence[Seen], disturbed: Sequence[Seen], model: Path
) -> dict[int, str]:
    """By its index, where each answer parts from the undisturbed one, near ties aside; both must be complete."""
    ids = ids_by_bytes(model)
    triples = enumerate(zip(bodies, undisturbed, disturbed, strict=True))
    found = {index: _difference(body, one, other, ids) for index, (body, one, other) in triples}
    return {index: text for index, text in found.items() if text}


def num_parted(undisturbed: Sequence[Seen], disturbed: Sequence[Seen]) -> int:
    """How many answers are not the same tokens."""
    return sum(one.tokens != other.tokens for one, other in zip(undisturbed, disturbed, strict=True))


def _pairs(bodies: Sequence[dict[str, Any]], answers: Sequence[Seen]) -> list[tuple[dict[str, Any], Seen]]:
    return list(zip(bodies, answers, strict=True))


def _missing(tokens: int, seen: Seen) -> str:
    if seen.problem:
        return seen.problem
    counts = (len(seen.tokens), seen.finishes, seen.usage.get("completion_tokens"), seen.is_done)
    return "" if counts == (tokens, ["length"], tokens, True) else f"{counts}"


def _difference(body: dict[str, Any], first: Seen, second: Seen, ids: dict[tuple[int, ...], int]) -> str:
    if first.usage["prompt_tokens"] != second.usage["prompt_tokens"]:
        return f"usage: {first.usage}, then {second.usage}"
    if first.tokens == second.tokens:
        same_scores = all(abs(a - b) <= NEAR_TIE for a, b in zip(first.logprobs, second.logprobs, strict=True))
        return "" if first.text == second.text and same_scores else "text or log probabilities"
    pairs = zip(first.tokens, second.tokens, strict=True)
    place = next(index for index, (one, other) in enumerate(pairs) if one != other)
    parting = Parting(body["temperature"], body["seed"], first.usage["prompt_tokens"] + place)
    is_tie = parting.is_near_tie(ids, *((seen.tokens[place], seen.logprobs[place]) for seen in (first, second)))
    return "" if is_tie else f"token {place}: {first.tokens[place]}, then {second.tokens[place]}"
