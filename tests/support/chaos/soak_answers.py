"""What a client of the soak made of an answer, and whether it is the answer that was due. Pure.

Answers are compared token for token. Two may part at a near tie alone (`token_scores`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from oracles.token_scores import NEAR_TIE, Parting

Token = tuple[int, ...]
"""The bytes of a token."""


@dataclass(slots=True)
class Choice:
    """One of the answers to a prompt."""

    tokens: list[Token] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str = ""

    def take(self, told: Mapping[str, Any], text: str | None) -> int:
        """A choice of a chunk or of a whole answer; returns how many tokens it brought."""
        entries = (told.get("logprobs") or {}).get("content") or ()
        self.tokens += [tuple(entry["bytes"]) for entry in entries]
        self.logprobs += [entry["logprob"] for entry in entries]
        self.text += text or ""
        self.finish += told["finish_reason"] or ""
        return len(entries)


@dataclass(slots=True)
class Answer:
    """All choices by index, and how the answer ended."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    status: int = 0
    is_done: bool = False
    resumes: int = 0
    problem: str = ""
    """An error event, or what became of the connection."""
    lost_connection: bool = False

    def take_line(self, line: str) -> int:
        """A line of a stream; returns how many tokens it brought."""
        if line == "data: [DONE]":
            self.is_done = True
        if not line.startswith("data: {"):
            return 0
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.problem = json.dumps(event["error"])
            return 0
        self._take_usage(event.get("usage"))
        return sum(self._choice(one).take(one, one["delta"].get("content")) for one in event["choices"])

    def take_whole(self, body: Mapping[str, Any]) -> None:
        """An answer that was not streamed."""
        self._take_usage(body["usage"])
        for one in body["choices"]:
            self._choice(one).take(one, one["message"]["content"])
        self.is_done = True

    def _choice(self, told: Mapping[str, Any]) -> Choice:
        return self.choices.setdefault(told["index"], Choice())

    def _take_usage(self, usage: Mapping[str, Any] | None) -> None:
        if usage:
            self.usage = {name: count for name, count in usage.items() if isinstance(count, int)}
            self.resumes = self.usage.pop("stageline_resumes", 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices.values())


def what_is_missing(answer: Answer, choices: int) -> str:
    """Empty for a whole answer of so many choices, else what is wrong with it by itself."""
    if answer.problem or answer.status != 200:
        return f"HTTP {answer.status}: {answer.problem}"
    ends = [choice.finish for _, choice in sorted(answer.choices.items())]
    if len(ends) != choices or not set(ends) <= {"stop", "length"} or not answer.is_done:
        return f"ends {ends}, done {answer.is_done}"
    return ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Empty `difference`: the same answer, or one that parts at a near tie."""

    difference: str = ""
    parted: bool = False


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares answers to one request. `ids` are the model's token ids by their bytes."""

    ids: Mapping[Token, int]
    temperature: float
    seed: int

    def compare(self, due: Answer, seen: Answer, begun_only: bool = False) -> Comparison:
        """`begun_only`: the client left, so `seen` need only be a beginning."""
        comparisons = [
            self._compare_choice(index, due, choice, begun_only) for index, choice in sorted(seen.choices.items())
        ]
        parted = any(one.parted for one in comparisons)
        wrong = next((one.difference for one in comparisons if one.difference), "")
        if not wrong and not parted and not begun_only and due.usage != seen.usage:
            wrong = f"usage {seen.usage} where {due.usage} was due"
        return Comparison(wrong, parted)

    def _compare_choice(self, index: int, due: Answer, seen: Choice, begun_only: bool) -> Comparison:
        expected = due.choices[index]
        for place, (one, other) in enumerate(zip_longest(expected.tokens, seen.tokens)):
            if one != other:
                if other is None and begun_only:
                    break
                return self._at_parting(index, due, seen, place)
        pairs = zip(expected.logprobs, seen.logprobs, strict=False)
        if any(abs(one - other) > NEAR_TIE for one, other in pairs):
            return Comparison(f"choice {index}: log probabilities")
        if not (expected.text.startswith(seen.text) if begun_only else expected.text == seen.text):
            return Comparison(f"choice {index}: text {seen.text!r} where {expected.text!r} was due")
        same_end = begun_only or expected.finish == seen.finish
        return Comparison("" if same_end else f"choice {index}: ends by {seen.finish}, not {expected.finish}")

    def _at_parting(self, index: int, due: Answer, seen: Choice, place: int) -> Comparison:
        expected, where = due.choices[index], f"choice {index}, token {place}"
        if place >= len(expected.tokens) or place >= len(seen.tokens):
            return Comparison(f"{where}: {len(seen.tokens)} tokens where {len(expected.tokens)} were due")
        parting = Parting(self.temperature, self.seed, due.usage["prompt_tokens"] + place, index)
        if parting.is_near_tie(self.ids, *((each.tokens[place], each.logprobs[place]) for each in (expected, seen))):
            return Comparison(parted=True)
        return Comparison(f"{where}: {seen.tokens[place]} where {expected.tokens[place]} was due")
