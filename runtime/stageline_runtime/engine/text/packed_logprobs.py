"""Log probabilities of an output while they wait for its client: packed, and described when a line is made. Pure.

A token takes 14 bytes here, and 12 more for each alternative listed with it. As objects they take fifty times as
much, and a slow client never holds a group back. Values are float64, so they are returned digit for digit.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from stageline_runtime.engine.text.token_bytes import TokenBytes, describe
from stageline_runtime.plan_bus.messages import TokenLogprobs

ListedToken = tuple[int, TokenLogprobs]
"""A sampled token's id with its log probabilities."""


class PackedLogprobs:
    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._ids = array("i")
        """Of each token, and after it of its alternatives."""
        self._values = array("d")
        """Log probabilities, likewise."""
        self._counts = array("H")
        """How many alternatives each token has."""

    def __len__(self) -> int:
        """Tokens that wait."""
        return len(self._counts)

    def add(self, listed: Iterable[ListedToken]) -> None:
        """Put tokens behind those that wait.

        Raises:
            OverflowError: an id is no int32.
        """
        for token_id, logprobs in listed:
            self._ids.append(token_id)
            self._values.append(logprobs.logprob)
            for other, value in logprobs.top:
                self._ids.append(other)
                self._values.append(value)
            self._counts.append(len(logprobs.top))

    def take_described(self, count: int) -> list[dict[str, object]]:
        """The values of `take`, in the form of an answer's line."""
        return [describe(token_id, logprobs, self._token_bytes) for token_id, logprobs in self.take(count)]

    def take(self, count: int) -> Sequence[ListedToken]:
        """The first `count` of those that wait, which wait no more."""
        assert 0 <= count <= len(self), f"{count} of {len(self)} tokens"
        taken = list(self._first(count))
        entries = count + sum(self._counts[:count])
        del self._ids[:entries], self._values[:entries], self._counts[:count]
        return taken

    def _first(self, count: int) -> Iterator[ListedToken]:
        start = 0
        for alternatives in self._counts[:count]:
            end = start + 1 + alternatives
            top = zip(self._ids[start + 1 : end], self._values[start + 1 : end], strict=True)
            yield self._ids[start], TokenLogprobs(self._values[start], tuple(top))
            start = end
