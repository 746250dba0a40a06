"""Requests made to hold others up, drawn from a seed: each kind aims at one thing that a server does for a request.

Some are refused and some are answered. What counts is that nobody else waits for either.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_json

from hostility.repeated_parts import BODY_BYTES, CHATS, COMPLETIONS, REPEATED
from processes.gateway_harness import MODEL

_FEW: Final = 32


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """A POST of `body` to `path`."""

    kind: str
    path: str
    body: bytes


def hostile_requests(rng: random.Random, count: int) -> Iterator[HostileRequest]:
    """`count` of them, every kind as often as any other, in an order of their own."""
    makers: dict[str, Callable[[random.Random], tuple[str, bytes]]] = {
        **{kind: _of_repeated(kind) for kind in REPEATED},
        **{kind: _of_fields(make) for kind, make in _MADE.items()},
        "bytes exchanged": _exchanged,
        "cut off": _cut_off,
        "texts made wide": _widened,
    }
    order = [kind for _ in range(-(-count // len(makers))) for kind in rng.sample(sorted(makers), len(makers))]
    for kind in order[:count]:
        yield HostileRequest(kind, *makers[kind](rng))


def _size(rng: random.Random) -> int:
    """Small ones as often as large ones: some limits are by count, not by bytes."""
    return rng.choice((1_000, 30_000, 500_000, BODY_BYTES))


def _of_repeated(kind: str) -> Callable[[random.Random], tuple[str, bytes]]:
    return lambda rng: (REPEATED[kind].path, REPEATED[kind].body(_size(rng)))


def _of_fields(make: Callable[[random.Random], dict[str, Any]]) -> Callable[[random.Random], tuple[str, bytes]]:
    def written(rng: random.Random) -> tuple[str, bytes]:
        fields = {"model": MODEL, "max_tokens": _FEW} | make(rng)
        return (CHATS if "messages" in fields else COMPLETIONS), json.dumps(fields, ensure_ascii=False).encode()

    return written


def _exchanged(rng: random.Random) -> tuple[str, bytes]:
    """A good body of which some bytes are others."""
    body = bytearray(to_json({"model": MODEL, "prompt": "once upon a time " * 200, "max_tokens": _FEW, "stop": ["x"]}))
    for _ in range(rng.randint(1, 8)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return COMPLETIONS, bytes(body)


def _cut_off(rng: random.Random) -> tuple[str, bytes]:
    whole = REPEATED[rng.choice(sorted(REPEATED))]
    body = whole.body(_size(rng))
    return whole.path, body[: rng.randrange(1, len(body))]


def _widened(rng: random.Random) -> tuple[str, bytes]:
    """Texts of ASCII in which one emoji takes four bytes for each character, and which are joined."""
    part = {"type": "text", "text": "x" * (_size(rng) // 2 - 200) + "\U0001f600"}
    fields = {"model": MODEL, "max_tokens": _FEW, "top_k": 3, "messages": [{"role": "user", "content": [part, part]}]}
    return CHATS, json.dumps(fields, ensure_ascii=False).encode()


def _text(rng: random.Random, piece: str) -> str:
    return piece * max(1, (_size(rng) - 200) // (len(json.dumps(piece, ensure_ascii=False).encode()) - 2))


def _schema(make: Callable[[random.Random], Any]) -> Callable[[random.Random], dict[str, Any]]:
    def request(rng: random.Random) -> dict[str, Any]:
        named = {"name": "n", "schema": make(rng)}
        message = {"role": "user", "content": "x"}
        return {"messages": [message], "response_format": {"type": "json_schema", "json_schema": named}}

    return request


def _deep(rng: random.Random) -> Any:
    inner: Any = {"type": "integer"}
    for _ in range(rng.randint(5, 400)):
        inner = {"type": "array", "items": inner} if rng.random() < 0.5 else {"anyOf": [inner, {"type": "null"}]}
    return inner


def _wide(rng: random.Random) -> Any:
    names = [f"field_{index}" for index in range(rng.randint(50, 3000))]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}


def _ambiguous(rng: random.Random) -> dict[str, Any]:
    """A grammar that compiles at once and reads a text in very many ways, some of them only after a beginning."""
    parts = range(2, rng.choice((4, 8, 15, 30, 110)))
    rules = " | ".join(" ".join(["s"] * count) for count in parts)
    letter = rng.choice(("/[a-z]/", "/./", '/[a-z]/ | " "'))
    beginning = rng.choice(("", "/[a-y]+/", '/[a-y]+/ "z"'))
    grammar = f'start: {beginning} s\ns: {rules} | {letter} | ""\n'
    return {"prompt": "x", "n": rng.choice((1, 8, 31)), "structured_outputs": {"grammar": grammar}}


def _numbers(rng: random.Random) -> Any:
    """Few bytes in a body, and many for a template that indents them."""
    numbers: Any = [1] * rng.choice((1_000, 30_000, 300_000))
    for _ in range(rng.choice((1, 50, 150))):
        numbers = [numbers]
    return numbers


def _call_with(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _conversation(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(1, 4_000)
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[at % 2], "content": "x"} for at in range(count)] + [{"role": "user", "content": ""}]
    }


_MADE: Final[dict[str, Callable[[random.Random], dict[str, Any]]]] = {
    "digits": lambda rng: {"prompt": _text(rng, str(rng.randrange(10)))},
    "one letter": lambda rng: {"prompt": _text(rng, "a")},
    "letters with marks": lambda rng: {"prompt": _text(rng, "e\u0301\u200d")},
    "blanks": lambda rng: {"prompt": _text(rng, " \n")},
    "emoji": lambda rng: {"prompt": _text(rng, "👩‍👩‍👧‍👦")},
    "template words": lambda rng: {"messages": [{"role": "user", "content": _text(rng, "{% for x in y %}")}]},
    "a long conversation": _conversation,
    "ids": lambda rng: {"prompt": [1] * rng.randint(1, 400_000)},
    "many choices": lambda rng: {"prompt": _text(rng, "once "), "n": rng.choice((2, 16, 128))},
    "all log probabilities": lambda rng: {"prompt": "once", "logprobs": 20, "n": rng.choice((1, 8)), "max_tokens": 400},
    "prompt echoed": lambda rng: {"prompt": _text(rng, "once "), "echo": True, "logprobs": 5},
    "several prompts": lambda rng: {"prompt": ["once upon"] * rng.randint(2, 3000)},
    "stop strings": lambda rng: {"prompt": "x", "stop": ["a" * 250 + str(at) for at in range(rng.randint(1, 40))]},
    "a long stop string": lambda rng: {"prompt": "x", "stop": _text(rng, "ab")},
    "words forbidden": lambda rng: {"prompt": "x", "bad_words": [f"w{at}" for at in range(rng.randint(1, 5000))]},
    "many biases": lambda rng: {"prompt": "x", "logit_bias": {str(at): -1 for at in range(rng.randint(1, 1500))}},
    "multiples": _schema(lambda rng: {"type": "integer", "multipleOf": rng.choice((399_989, 1_999_993, 7))}),
    "a deep schema": _schema(_deep),
    "a wide schema": _schema(_wide),
    "a long enumeration": _schema(lambda rng: {"enum": [f"value {at}" for at in range(rng.randint(10, 20_000))]}),
    "lengths": _schema(lambda rng: {"type": "string", "minLength": rng.choice((9, 9_999)), "maxLength": 10**6}),
    "a schema of itself": _schema(lambda _: {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
    "a slow expression": lambda rng: {
        "prompt": "x",
        "structured_outputs": {"regex": f"(a+)+{{{rng.randint(1, 2000)}}}b"},
    },
    "a large expression": lambda rng: {
        "prompt": "x",
        "structured_outputs": {"regex": f"(a|b){{1,{rng.randint(1, 60_000)}}}"},
    },
    "a large grammar": lambda rng: {
        "prompt": "x",
        "structured_outputs": {"grammar": "root ::= " + " | ".join(f'"w{at}"' for at in range(rng.randint(1, 5000)))},
    },
    "an ambiguous grammar": _ambiguous,
    "many empty messages": lambda rng: {
        "user": "u",
        "messages": [{"role": "user", "content": ""}] * rng.randint(1_000, 2_000),
    },
    "numbers in a tool": lambda rng: {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": _numbers(rng)}}}],
    },
    "numbers in a call": lambda rng: {"messages": [_call_with(json.dumps({"a": _numbers(rng)}))]},
    "many tools": lambda rng: {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": f"f{at}"}} for at in range(rng.randint(1, 2000))],
    },
}
