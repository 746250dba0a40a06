"""Recently finished answers, as a source of drafts for requests that start the same way. Pure.

A repeated question, or another question about the same document, often gets the same words. Answers are stored by the
first tokens of their prompts and by the cache salt. The prefix cache shares by the same rule: a request drafts only
from answers with a prefix that it may find in the cache.

The number of answers is bounded, each with its first tokens only; the answer that gave no draft for longest is evicted.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Final, NamedTuple

from stageline_runtime.speculation.lookup import ngram_sizes

PREFIX_TOKENS: Final = 16
"""Prompts are of one kind when so many of their first tokens are equal, or all of shorter ones."""
MOST_ANSWER_TOKENS: Final = 2048
"""Of an answer, and so of one request's end: a few milliseconds of work."""
LONG_MATCH: Final = 8
"""Tokens that tell apart places of an answer that few of them don't."""
MOST_LOOKED_AT: Final = 8
"""Of answers to prompts of one kind, the newest, so that a draft costs microseconds."""

Key = tuple[str, tuple[int, ...]]


class Match(NamedTuple):
    """The end of what a request knows, found in an answer."""

    size: int
    """How many of its last tokens."""
    answer: tuple[int, ...]
    place: int
    """Where the answer continues after them."""

    def following(self, count: int) -> tuple[int, ...]:
        """What came after them, at most `count` tokens."""
        return self.answer[self.place : self.place + count]


class _Answer:
    """One answer behind the end of its prompt, and the place after each of its n-grams, the last of equal ones.

    The prompt's end leads to the answer's first token only as a long n-gram: all prompts of a template end alike.
    """

    def __init__(self, asked: Sequence[int], said: Sequence[int], sizes: Sequence[int]) -> None:
        self.tokens = (*asked, *said)
        self.after = {
            self.tokens[end - size : end]: end
            for size in sizes
            for end in range(max(size, len(asked) + (size < sizes[0])), len(self.tokens))
        }


class RecentAnswers:
    """The answers of one scheduler's requests, at most `most` of them."""

    def __init__(self, most: int, min_match: int) -> None:
        self._most = most
        short = ngram_sizes(min_match)
        self._sizes: tuple[int, ...] = (max(LONG_MATCH, short[0] + 1), *short)
        self._numbers = count()
        self._answers: OrderedDict[tuple[Key, int], _Answer] = OrderedDict()
        self._of_key: dict[Key, list[int]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def longest(self) -> int:
        """How many of its last tokens a request has to show, if it has as many."""
        return self._sizes[0]

    def note_answer(self, prompt: Sequence[int], cache_salt: str, output: Sequence[int]) -> None:
        """An answer has ended, by whatever ended it."""
        if not output or not self._most:
            return
        key, number = key_of(prompt, cache_salt), next(self._numbers)
        self._answers[key, number] = _Answer(prompt[-self.longest :], output[:MOST_ANSWER_TOKENS], self._sizes)
        self._of_key.setdefault(key, []).append(number)
        while len(self._answers) > self._most:
            self._forget(next(iter(self._answers)))

    def match(self, key: Key, end: tuple[int, ...], *, longer_than: int) -> Match | None:
        """The longest n-gram at `end` in the newest answers of `key`; None where none is `longer_than` that."""
        newest = self._of_key.get(key, [])[: -MOST_LOOKED_AT - 1 : -1]
        for size in self._sizes:
            if size <= longer_than:
                return None
            sought = end[-size:]
            for number in newest if size <= len(end) else ():
                answer = self._answers[key, number]
                if (place := answer.after.get(sought)) is not None:
                    self._answers.move_to_end((key, number))
                    return Match(size, answer.tokens, place)
        return None

    def _forget(self, name: tuple[Key, int]) -> None:
        key, number = name
        del self._answers[name]
        numbers = self._of_key[key]
        numbers.remove(number)
        if not numbers:
            del self._of_key[key]


def key_of(prompt: Sequence[int], cache_salt: str) -> Key:
    """What requests must have in common to draft from one another's answers."""
    return cache_salt, tuple(prompt[:PREFIX_TOKENS])
