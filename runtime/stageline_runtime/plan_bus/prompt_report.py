"""Log probabilities of a prompt's tokens on their way from the last stage to the engine: packed, so of a bounded size.

A token takes 8 bytes, and 8 more for each alternative that is listed with it. Numbers are little-endian.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from stageline_runtime.plan_bus.step_plan import BusProtocolError, Count, Message

ENTRY_BYTES = 8
"""What a token takes here, and what each of its alternatives takes."""


def report_bytes(num_tokens: int, top_count: int) -> int:
    """What the log probabilities of so many tokens take while they are packed."""
    return num_tokens * (1 + top_count) * ENTRY_BYTES


class PromptReport(Message, frozen=True):
    """Last stage to engine, with a `StepDone`: log probabilities of consecutive tokens of one request's prompt."""

    slot: int
    generation: int
    position: Count
    """Of the first token in the prompt."""
    top_count: Count
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

    def check(self) -> None:
        """Raises BusProtocolError where the fields don't describe the same tokens."""
        top_bytes = self.top_count * len(self.logprobs)
        expected = {"ranks": len(self.logprobs), "top_ids": top_bytes, "top_logprobs": top_bytes}
        for name, size in expected.items():
            if (found := len(getattr(self, name))) != size:
                raise BusProtocolError(f"PromptReport.{name} of {self.num_tokens} tokens has {found} bytes, not {size}")

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
    width, each = report.top_count, slice(start, stop)
    logprobs, ranks = _numbers("f", report.logprobs, each), _numbers("i", report.ranks, each)
    of_all = slice(start * width, stop * width)
    top_ids, top_logprobs = _numbers("i", report.top_ids, of_all), _numbers("f", report.top_logprobs, of_all)
    for index in range(stop - start):
        top = slice(index * width, (index + 1) * width)
        yield PromptLogprobs(logprobs[index], ranks[index], tuple(zip(top_ids[top], top_logprobs[top], strict=True)))


def packed(kind: Literal["f", "i"], numbers: Iterable[float]) -> bytes:
    """Numbers of one kind (`f` float32, `i` int32) as a report has them."""
    values = tuple(numbers)
    return struct.pack(f"<{len(values)}{kind}", *values)


def _numbers(kind: Literal["f", "i"], data: bytes, which: slice) -> tuple[Any, ...]:
    return struct.unpack_from(f"<{which.stop - which.start}{kind}", data, 4 * which.start)
