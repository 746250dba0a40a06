"""What the soak asks: kinds of requests as many users would send them, each with one answer that is due.

All are greedy or seeded, in float32, so that an answer is the same whenever it is asked for. None cuts the distribution
off (`top_p`, `top_k`) or bends it (penalties): a near tie could not be told from a fault there.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

MODEL: Final = "tiny"
CONTEXT: Final = 512
_SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_SHARED: Final = "Once the and in there was an inn, and the rain ran on; " * 4
_REFUSALS: Final[tuple[Mapping[str, Any], ...]] = (
    {"temperature": -1},
    {"max_tokens": "many"},
    {"n": 0},
    {"messages": []},
    {"messages": [{"role": "user", "content": "the " * CONTEXT}]},
    {"model": "unknown"},
    {"response_format": {"type": "xml"}},
    {"unheard_of": True},
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `leave_after` is after how many tokens its client goes away; `is_refused`: it must get a 4xx."""

    kind: str
    body: Mapping[str, Any]
    leave_after: int | None = None
    is_refused: bool = False

    @property
    def choices(self) -> int:
        """How many answers it asks for."""
        return int(self.body.get("n", 1)) if not self.is_refused else 0


def requests_of(rng: random.Random, each: int) -> list[Request]:
    """`each` requests of every kind, in an order of their own."""
    found = [Request(kind, make(rng)) for kind, make in _KINDS.items() for _ in range(each)]
    found += [Request("left", _streamed(rng, max_tokens=96), leave_after=rng.randint(1, 40)) for _ in range(each)]
    refusals = [dict(rng.choice(_REFUSALS)) for _ in range(each)]
    found += [Request("refused", _streamed(rng) | refusal, is_refused=True) for refusal in refusals]
    rng.shuffle(found)
    return found


def _body(rng: random.Random, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "seed": rng.randrange(2**31),
        "max_tokens": max_tokens,
        "logprobs": True,
        "ignore_eos": True,
        **more,
    }


def _prompt(rng: random.Random) -> str:
    return f"{'the ' * rng.randrange(7)}story number {rng.randrange(10**6)}"


def _streamed(rng: random.Random, max_tokens: int = 48, **more: Any) -> dict[str, Any]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return _body(rng, _prompt(rng), max_tokens, **usage | more)


def _guided(rng: random.Random) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    return _streamed(rng, 64, temperature=1.0, ignore_eos=False, response_format=schema)


def _shared(rng: random.Random) -> dict[str, Any]:
    body = _streamed(rng, 32)
    return body | {"messages": [{"role": "user", "content": _SHARED + _prompt(rng)}]}


_KINDS: Final[Mapping[str, Callable[[random.Random], dict[str, Any]]]] = {
    "greedy": _streamed,
    "seeded": lambda rng: _streamed(rng, temperature=1.0),
    "several": lambda rng: _streamed(rng, 32, temperature=1.0, n=3),
    "guided": _guided,
    "whole": lambda rng: _body(rng, _prompt(rng), 48),
    "shared": _shared,
    "long": lambda rng: _streamed(rng, 320, temperature=float(rng.randrange(2))),
    "stopped": lambda rng: _streamed(rng, 96, temperature=1.0, ignore_eos=False, stop=["e", "\n"]),
}
KINDS: Final = (*_KINDS, "left", "refused")
