"""Log probabilities of a prompt's tokens on their way from the last stage to the engine: packed, so of a bounded size.

A token takes 8 bytes, and 8 more for each alternative that is listed with it. Numbers are little-endian.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from stageline_runtime.plan_bus.step_plan import Message

Number = TypeVar("Number", int, float)

ENTRY_BYTES = 8
"""What a token takes here, and what each of its alternatives takes."""


def report_bytes(num_tokens: int, top_count: int) -> int:
    """What the log probabilities of so many tokens take while they are packed."""
    return num_tokens * (1 + top_count) * ENTRY_BYTES


class PromptReport(Message, frozen=True):
    """Last stage to engine, with a `StepDone`: log probabilities of consecutive tokens of one request's prompt."""

    slot: int
    generation: int
    position: int
    """Of the first token in the prompt."""
    top_count: int
    """Alternatives listed with each token."""
    logprobs: bytes
    """float32 of each token."""
    ranks: bytes
    """int32 of each token: one more than how many tokens are likelier."""
    top_ids: bytes
    """int32, `top_count` of each token, likeliest first."""
    top_logprobs: bytes
    """float32, likewise."""

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs) // 4

    @property
    def size_bytes(self) -> int:
        return report_bytes(self.num_tokens, self.top_count)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of one prompt token, natural and under the raw logits."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """(token id, value), likeliest first."""


def unpacked(report: PromptReport, start: int, stop: int) -> Iterator[PromptLogprobs]:
    """Those of the report's tokens `start` up to `stop`, in order."""
    logprobs, ranks = _floats(report.logprobs), _ints(report.ranks)
    top_ids, top_logprobs = _ints(report.top_ids), _floats(report.top_logprobs)
    for index in range(start, stop):
        first = index * report.top_count
        top = slice(first, first + report.top_count)
        yield PromptLogprobs(logprobs[index], ranks[index], tuple(zip(top_ids[top], top_logprobs[top], strict=True)))


def packed(kind: Literal["f", "i"], numbers: Iterable[float]) -> bytes:
    """Numbers of one kind (`f` float32, `i` int32) as a report has them."""
    values: array[float] = array(kind, numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _floats(data: bytes) -> "array[float]":
    return _unpacked(array("f"), data)


def _ints(data: bytes) -> "array[int]":
    return _unpacked(array("i"), data)


def _unpacked(numbers: "array[Number]", data: bytes) -> "array[Number]":
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
