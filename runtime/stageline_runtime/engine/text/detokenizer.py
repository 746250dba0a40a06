"""Token ids to text in chunks, never emitting half a character or the start of a stop string.

Decoding a single token fails in two ways: a character may span tokens (its bytes decode to U+FFFD until it is
whole), and some decoders drop a leading space at the start of a text. So a short window is decoded repeatedly: the
tokens of the previous chunk as context, then the new ones; the growth is the new text. Trailing U+FFFDs are held
back, since the next token may complete them. When the window ends on a whole character it advances, so each token
is decoded a few times, however long the output is. All chunks together equal the decoding of all ids at once (if
the ids encode broken UTF-8, a byte-fallback decoder may show it differently).

The first window starts with the prompt's last tokens, since the text of an answer's first token depends on them: at
the start of a text those decoders drop its leading space. A prompt may also end in half a character, which then
belongs to the answer that completes it.

One Knuth-Morris-Pratt automaton per stop string reads each character once. The first character that completes a
stop string ends the output (the longest one when several end there), so the result depends on the text alone, never
on its chunks. The stop string itself is not returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from stageline_runtime.engine.text.tokenizer import EngineTokenizer

REPLACEMENT = "\ufffd"
MAX_WAITING_TOKENS = 16
"""A character has at most four bytes; with this many tokens waiting, the held-back bytes are permanently invalid."""
SPLIT_SEARCH_TOKENS = 8
MIN_CONTEXT_TOKENS = 6
MAX_CONTEXT_TOKENS = 32
"""Last tokens of a prompt that an answer is decoded behind: more than the least where they begin inside a character."""


class IncrementalDetokenizer:
    """The text of one request."""

    def __init__(
        self,
        tokenizer: EngineTokenizer,
        prompt_token_ids: Sequence[int] = (),
        hidden_token_ids: frozenset[int] | None = None,
    ) -> None:
        """`prompt_token_ids`: what the output continues, of which its end is read. `hidden_token_ids` don't show; None:
        those are control tokens.
        """
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if hidden_token_ids is None else hidden_token_ids
        self._window: list[int] = []
        self._context = 0
        """Leading tokens of the window with released text."""
        self._context_text = ""
        """What the context decodes to."""
        self._released = 0
        """Characters of the window's text that have been released."""
        self._restart(_end_of(prompt_token_ids, tokenizer), as_context=True)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that no later token can change."""
        # Left out, hidden tokens don't lengthen the window either.
        visible = [index for index in token_ids if index not in self._hidden]
        if not visible:
            return ""
        self._window += visible
        text = self._text()
        released = self._release(text, len(text.rstrip(REPLACEMENT)))
        if not text.endswith(REPLACEMENT) and len(text) > len(self._context_text):
            self._restart(self._window[self._context :], as_context=True)
        elif len(self._window) - self._context > MAX_WAITING_TOKENS:
            released += self._give_up_waiting(text)
        return released

    def flush(self) -> str:
        """The text still held back, at the end of the output; an incomplete character becomes U+FFFD."""
        text = self._text()
        return self._release(text, len(text))

    def _text(self) -> str:
        """The window's text. A character that the prompt had half of is released by the output that completes it."""
        text = self._decoded(self._window)
        if not text.startswith(self._context_text):
            self._context_text = self._context_text.rstrip(REPLACEMENT)
            self._released = min(self._released, len(self._context_text))
        return text

    def _release(self, text: str, end: int) -> str:
        piece = text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def _give_up_waiting(self, text: str) -> str:
        """Move the window past tokens that will never become a whole character, or that show nothing at all.

        A split of the window is safe where both parts decode, on their own, to what they decode to together: no byte
        sequence then crosses it. Without a safe split the window just stays.
        """
        if len(text) <= len(self._context_text) and not text.endswith(REPLACEMENT):
            del self._window[self._context :]
            return ""
        for split in range(len(self._window) - 1, len(self._window) - SPLIT_SEARCH_TOKENS, -1):
            head = self._decoded(self._window[:split])
            if head + self._decoded(self._window[split:]) == text:
                piece = self._release(text, len(head))
                already_released = self._released - len(head)
                self._restart(self._window[split:], as_context=False)
                self._released = already_released
                return piece
        return ""

    def _restart(self, window: list[int], *, as_context: bool) -> None:
        self._window = window
        self._context = len(window) if as_context else 0
        self._context_text = self._decoded(window) if as_context else ""
        self._released = len(self._context_text)

    def _decoded(self, window: Sequence[int]) -> str:
        """Text of tokens that show."""
        return self._tokenizer.decode(window, skip_special_tokens=False)


def _end_of(prompt_token_ids: Sequence[int], tokenizer: EngineTokenizer) -> list[int]:
    """The fewest last tokens of a prompt that show text and begin with a whole character."""
    visible = (index for index in reversed(prompt_token_ids) if index not in tokenizer.special_token_ids)
    end = list(islice(visible, MAX_CONTEXT_TOKENS))[::-1]
    for count in range(MIN_CONTEXT_TOKENS, len(end)):
        if not tokenizer.decode(end[-count:]).startswith(REPLACEMENT):
            return end[-count:]
    return end


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The text that a chunk released. After `matched` no more text is released."""

    text: str
    matched: bool


class StopStrings:
    """Scanner of one output. `stops` holds non-empty strings; with none, all text passes at once."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), f"a stop string must not be empty: {stops!r}"
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the output; the longest where several end at one character."""

    def push(self, text: str) -> StopMatch:
        """Scan the next piece; returns the text that can't be part of a stop string any more."""
        if self.found is not None:
            return StopMatch("", True)
        if not self._automata:
            return StopMatch(text, False)
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            # A list, because each of them must read the character.
            complete = [automaton.stop for automaton in self._automata if automaton.step(character)]
            if complete:
                self.found, self._held = max(complete, key=len), ""
                return StopMatch(pending[: end - len(self.found)], True)
        keep = max(automaton.matched for automaton in self._automata)
        self._held = pending[len(pending) - keep :]
        return StopMatch(pending[: len(pending) - keep], False)

    def flush(self) -> str:
        """The text still held back, at the end of an output that no stop string ended."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knows after each character how long a prefix of `stop` the text ends with."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._borders = _border_lengths(stop)
        self.matched = 0
        """Length of the longest proper prefix of `stop` that ends the text so far."""

    def step(self, character: str) -> bool:
        """Read a character; returns whether it completes the stop string."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        if self.matched < len(self.stop):
            return False
        self.matched = 0
        return True


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
