"""Stop strings found in text that arrives in pieces, without ever releasing the beginning of one.

One Knuth-Morris-Pratt automaton per stop string reads each character once. The first character that completes a stop
string ends the output (the longest one when several end there), so the result depends on the text alone, never on how
it was cut into pieces. The stop string itself is not returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What a piece of text released. After `matched` nothing more is ever released."""

    text: str
    matched: bool


class StopStrings:
    """Scanner of one output. `stops` holds non-empty strings; with none, all text passes at once."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), f"a stop string must not be empty: {stops!r}"
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self._matched = False

    def push(self, text: str) -> StopMatch:
        """Scan the next piece; returns the text that can't be part of a stop string any more."""
        if self._matched:
            return StopMatch("", True)
        if not self._automata:
            return StopMatch(text, False)
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = max((automaton.step(character) for automaton in self._automata), default=0)
            if complete:
                self._matched, self._held = True, ""
                return StopMatch(pending[: end - complete], True)
        keep = max(automaton.matched for automaton in self._automata)
        self._held = pending[len(pending) - keep :]
        return StopMatch(pending[: len(pending) - keep], False)

    def flush(self) -> str:
        """The text still held back, at the end of an output that no stop string ended."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knows after each character how long a prefix of `stop` the text ends with."""

    __slots__ = ("_borders", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _border_lengths(stop)
        self.matched = 0
        """Length of the longest proper prefix of `stop` that ends the text so far."""

    def step(self, character: str) -> int:
        """Read a character; returns the length of the stop string when it is complete, else 0."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self._stop[self.matched] == character:
            self.matched += 1
        if self.matched < len(self._stop):
            return 0
        self.matched = 0
        return len(self._stop)


def _border_lengths(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
