"""What keys, models and the gateway as a whole hold of their limits at the moment, for one process or several. Pure.

An account is a row of numbers. Of what is held, each process writes its own number and no other's, so giving back needs
no lock, and what a process held is known when it is gone. Whether there is room for more is decided in a `turn`, which
one process has at a time: what is found to be free there is still free when it is taken. Only in a turn may `shared`
numbers be written, and whether an account exists.
"""

from collections.abc import MutableSequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol, TypeAlias


class Held(IntEnum):
    """What a process holds in an account."""

    PLACES = 0
    """Of a key or the gateway: choices of open requests. Of a model: those without a first token."""
    ARRIVING = 1
    """Requests whose bodies are on their way."""
    BODY_BYTES = 2
    CONNECTIONS = 3
    """Of the gateway."""
    SPENT_TOKENS = 4
    """Of a key, ever. This one stays when the process has ended."""


NUM_SHARED: Final = 10
"""Of an account: three buckets of three numbers (`keys.Bucket`), and the tokens that were taken from one of them."""

Numbers: TypeAlias = "MutableSequence[float] | memoryview[float]"


@dataclass(slots=True)
class Account:
    """The account of one name, as the process with the index `me` among `processes` sees it."""

    held: "MutableSequence[int] | memoryview[int]" = field(default_factory=lambda: [0] * len(Held))
    """A number for each kind and process, those of one kind side by side."""
    shared: Numbers = field(default_factory=lambda: [0.0] * NUM_SHARED)
    me: int = 0
    processes: int = 1

    def add(self, kind: Held, amount: int) -> None:
        """This process holds so much more, or, negative, so much less."""
        self.held[kind * self.processes + self.me] += amount

    def put(self, kind: Held, amount: int) -> None:
        self.held[kind * self.processes + self.me] = amount

    def mine(self, kind: Held) -> int:
        return self.held[kind * self.processes + self.me]

    def total(self, kind: Held) -> int:
        """What all processes hold."""
        if self.processes == 1:
            return self.held[kind]
        first = kind * self.processes
        return sum(self.held[first : first + self.processes])


class Books(Protocol):
    """All accounts."""

    @property
    def turn(self) -> AbstractContextManager[None]:
        """Within it no other process decides anything. Not to be entered twice, nor held over an `await`.

        Raises ApiError 503 when another process does not end its own.
        """

    def account(self, kind: str, name: str) -> Account:
        """That of a name among those of its kind: always the same. Not to be called in a turn. Raises ApiError 503."""


@dataclass(slots=True)
class OwnBooks:
    """Of a gateway of one process, whose turn it always is."""

    turn: AbstractContextManager[None] = field(default_factory=nullcontext)
    _accounts: dict[tuple[str, str], Account] = field(default_factory=dict)

    def account(self, kind: str, name: str) -> Account:
        found = self._accounts.get((kind, name))
        if found is None:
            found = self._accounts[kind, name] = Account()
        return found
