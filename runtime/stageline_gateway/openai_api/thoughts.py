"""What a reasoning model thinks before it answers, split from the answer's text while it comes. Pure.

Thoughts stand between `<think>` and `</think>` at the beginning, or begin at once where the prompt opened them. Only
the start of a possible mark is held back; blanks around the marks belong to neither side. Of those before a mark only
so many are waited for: what an answer does with more is no layout, and its client and this process wait for nothing.
"""

from enum import Enum
from typing import Final

from stageline_api.engine_http import ThoughtStart

OPENING: Final = "<think>"
CLOSING: Final = "</think>"
MOST_BLANKS: Final = 64
"""Held back before a mark: more of them before `<think>` are the answer's, before `</think>` the thoughts'."""


class _State(Enum):
    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


class ThoughtReader:
    def __init__(self, start: ThoughtStart, goes_on: bool = False) -> None:
        """`goes_on`: of a thought that the prompt opened, it ended in the middle and not at the mark."""
        self._state = _State.INSIDE if start is ThoughtStart.OPEN else _State.BEFORE
        self._rest = ""
        self._at_mark = start is ThoughtStart.OPEN and not goes_on
        """Only blanks have come since the last mark."""
        self.has_thought = start is ThoughtStart.OPEN

    @property
    def is_over(self) -> bool:
        """No more thoughts can come."""
        return self._state is _State.AFTER

    def push(self, text: str) -> tuple[str, str]:
        """What `text` adds to the thoughts, and what to the answer."""
        if self._state is _State.AFTER and not self._at_mark:
            return "", text
        self._rest += text
        if self._state is _State.BEFORE and not self._opens():
            return "", self._answer()
        thought = self._inside() if self._state is _State.INSIDE else ""
        return thought, self._answer()

    def finish(self) -> tuple[str, str]:
        """What was held back, at the answer's end."""
        rest, self._rest = self._rest, ""
        return (rest, "") if self._state is _State.INSIDE else ("", rest)

    def _opens(self) -> bool:
        begun = self._rest.lstrip()
        if len(self._rest) - len(begun) > MOST_BLANKS:
            self._state = _State.AFTER
            return False
        if begun.startswith(OPENING):
            self._state, self._rest, self._at_mark = _State.INSIDE, begun[len(OPENING) :], True
            self.has_thought = True
            return True
        if not OPENING.startswith(begun):
            self._state = _State.AFTER
        return False

    def _inside(self) -> str:
        self._skip_blanks()
        thought, mark, after = self._rest.partition(CLOSING)
        if mark:
            self._state, self._rest, self._at_mark = _State.AFTER, after, True
            return thought[: len(thought) - _last_blanks(thought)]
        kept = _held_back(self._rest)
        thought, self._rest = self._rest[: len(self._rest) - kept], self._rest[len(self._rest) - kept :]
        return thought

    def _answer(self) -> str:
        if self._state is not _State.AFTER:
            return ""
        self._skip_blanks()
        answer, self._rest = self._rest, ""
        return answer

    def _skip_blanks(self) -> None:
        if self._at_mark:
            self._rest = self._rest.lstrip()
            self._at_mark = not self._rest


class ThoughtTokens:
    """How many of an answer's tokens went into thoughts, marks included.

    A piece that holds the end of the thoughts counts whole: tokens of it that are the answer's first can't be told.
    """

    def __init__(self, start: ThoughtStart | None) -> None:
        self._reader = None if start is None else ThoughtReader(start)
        self._before_the_answer = 0

    def take(self, text: str, num_tokens: int) -> None:
        """Count the tokens of the answer's next piece."""
        if self._reader is not None and not self._reader.is_over:
            self._before_the_answer += num_tokens
            self._reader.push(text)

    @property
    def count(self) -> int:
        has_thought = self._reader is not None and self._reader.has_thought
        return self._before_the_answer if has_thought else 0


def _held_back(text: str) -> int:
    """How many characters at the end of `text` may be blanks before the closing mark, or its beginning."""
    marked = next((size for size in range(len(CLOSING) - 1, 0, -1) if text.endswith(CLOSING[:size])), 0)
    return marked + _last_blanks(text[: len(text) - marked])


def _last_blanks(text: str) -> int:
    return min(len(text) - len(text.rstrip()), MOST_BLANKS)
