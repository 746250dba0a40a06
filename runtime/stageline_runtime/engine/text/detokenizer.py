"""Token ids to text, piece by piece, without ever showing half a character.

Decoding a single token is wrong twice: a character may span tokens (its bytes decode to U+FFFD until it is whole), and
some decoders drop a leading space at the start of what they decode. So a short window is decoded again and again: the
tokens of the previous piece as context, then the new ones; the growth is the new text. Trailing U+FFFDs are held back,
since the next token may complete them. When the window ends on a whole character it moves on, so each token is decoded
a few times, however long the output is. All pieces together equal the decoding of all ids at once (where the ids spell
broken UTF-8, a byte-fallback decoder may show it differently).
"""

from collections.abc import Sequence

from stageline_runtime.engine.text.tokenizer import EngineTokenizer

REPLACEMENT = "\ufffd"
MAX_WAITING_TOKENS = 16
"""A character has at most four bytes; with this many tokens waiting, the held-back bytes are broken for good."""
SPLIT_SEARCH_TOKENS = 8


class IncrementalDetokenizer:
    """The text of one request."""

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0
        """Leading tokens of the window whose text has been released."""
        self._context_length = 0
        """Characters that the context decodes to."""
        self._released = 0
        """Characters of the window's text that have been released."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that no later token can change."""
        # Special tokens show nothing; left out, they don't lengthen the window either.
        visible = [index for index in token_ids if index not in self._tokenizer.special_token_ids]
        if not visible:
            return ""
        self._window += visible
        text = self._tokenizer.decode(self._window)
        released = self._release(text, len(text.rstrip(REPLACEMENT)))
        if not text.endswith(REPLACEMENT) and len(text) > self._context_length:
            self._restart(self._window[self._context :], as_context=True)
        elif len(self._window) - self._context > MAX_WAITING_TOKENS:
            released += self._give_up_waiting(text)
        return released

    def flush(self) -> str:
        """The text still held back, at the end of the output; an incomplete character becomes U+FFFD."""
        text = self._tokenizer.decode(self._window)
        return self._release(text, len(text))

    def _release(self, text: str, end: int) -> str:
        piece = text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def _give_up_waiting(self, text: str) -> str:
        """Move the window past tokens that will never become a whole character, or that show nothing at all.

        A split of the window is safe where both parts decode, on their own, to what they decode to together: no byte
        sequence then crosses it. Without a safe split the window just stays.
        """
        if len(text) <= self._context_length and not text.endswith(REPLACEMENT):
            del self._window[self._context :]
            return ""
        for split in range(len(self._window) - 1, len(self._window) - SPLIT_SEARCH_TOKENS, -1):
            head = self._tokenizer.decode(self._window[:split])
            if head + self._tokenizer.decode(self._window[split:]) == text:
                piece = self._release(text, len(head))
                already_released = self._released - len(head)
                self._restart(self._window[split:], as_context=False)
                self._released = already_released
                return piece
        return ""

    def _restart(self, window: list[int], *, as_context: bool) -> None:
        self._window = window
        self._context = len(window) if as_context else 0
        self._context_length = len(self._tokenizer.decode(window)) if as_context else 0
        self._released = self._context_length
