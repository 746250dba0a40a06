"""Drafts by prompt lookup: the tokens that last followed the same few tokens in the request's own prompt and output.

Each request has an index of n-grams. Adding a token takes constant time, and a draft costs its own length; nothing is
searched. The longest indexed n-gram decides, with its most recent place before the end. A copy that would run past the
known tokens continues with the tokens it has copied, so repetitions of any period are followed.

Each call indexes a bounded number of tokens, so that one client's long prompt delays no step. Until all known tokens
are indexed there is no draft.
"""

from collections.abc import Sequence

NGRAM_SIZES = 3
"""N-grams of `min_match` tokens and of up to two more are indexed."""
TOKENS_PER_CALL = 4096
"""Most tokens indexed in one call, a few milliseconds of work."""


def ngram_sizes(min_match: int) -> range:
    """The longest first."""
    return range(min_match + NGRAM_SIZES - 1, min_match - 1, -1)


class Lookup:
    """The tokens of one request, and where each of their n-grams was seen last."""

    def __init__(self, min_match: int) -> None:
        self._sizes = ngram_sizes(min_match)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """By n-gram: the place right after it. The n-grams that end with the last token are not in it yet."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take more of the request's tokens, in order."""
        for token in tokens:
            self._index_end()
            self._tokens.append(token)

    @property
    def matched(self) -> int:
        """How many of the last tokens were seen before in this order, as far as is indexed; 0 where too few were."""
        return self._match()[0]

    def drafts(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may follow; none where the end was not seen before."""
        size, source = self._match()
        if not size:
            return ()
        tokens, copied = self._tokens, list[int]()
        for place in range(source, source + count):
            copied.append(tokens[place] if place < len(tokens) else copied[place - len(tokens)])
        return tuple(copied)

    def _match(self) -> tuple[int, int]:
        """The length of the longest n-gram at the end that was seen before, and the place after it; (0, 0) for none."""
        for size in self._sizes:
            if size < len(self._tokens):
                place = self._after.get(tuple(self._tokens[-size:]))
                if place is not None:
                    return size, place
        return 0, 0

    def _index_end(self) -> None:
        end = len(self._tokens)
        for size in self._sizes:
            if size <= end:
                self._after[tuple(self._tokens[end - size :])] = end
