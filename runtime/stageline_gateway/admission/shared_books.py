"""Accounts in memory that all workers of a gateway have, made before the first is started.

No process owns them, so none has to be asked, or can be too slow to answer: a request costs two turns, each two system
calls. A turn is a record lock on a file in memory. The kernel takes it from a process that ends, however it ends. A
process that is stopped in its turn would keep it; the others then wait for `PATIENCE_SECONDS` once, refuse what needs a
turn while it lasts, and go on with what they had let in. Who watches over the workers ends such a one.

Numbers are 8 bytes, aligned, and written whole. A process that is killed between two of them leaves a bucket a few
requests off at worst, and places none: those are its own, and `forget` gives them back.
"""

import errno
import fcntl
import mmap
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from types import TracebackType
from typing import Final

from stageline_gateway.admission.accounts import NUM_SHARED, Account, Held

MOST_ACCOUNTS: Final = 16384
"""Names of keys and models over the gateway's life. Room that is not used is never touched."""
PATIENCE_SECONDS: Final = 0.5
RETRY_AFTER_SECONDS: Final = 2.0
_FIRST_PAUSE_SECONDS: Final = 20e-6
_LONGEST_PAUSE_SECONDS: Final = 1e-3
_NUMBER_BYTES: Final = 8
_NAME_BYTES: Final = 16
_HEAD_BYTES: Final = _NUMBER_BYTES
_GIVEN_BACK: Final = (Held.PLACES, Held.ARRIVING, Held.BODY_BYTES, Held.CONNECTIONS)


@dataclass(slots=True)
class Turn(AbstractContextManager[None]):
    """Exclusive among the processes that have the file `descriptor`, of which each may have it open once."""

    descriptor: int
    patience_seconds: float = PATIENCE_SECONDS
    _is_stuck: bool = False

    def __enter__(self) -> None:
        if not self._is_taken():
            self._wait()
        self._is_stuck = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def _is_taken(self) -> bool:
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _wait(self) -> None:
        """Others have it for microseconds. The event loop stands still meanwhile, so only once for long."""
        until = time.monotonic() + (0.0 if self._is_stuck else self.patience_seconds)
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._is_taken():
            if time.monotonic() >= until:
                self._is_stuck = True
                raise _busy("A worker of this gateway holds all others up; it is being looked after.")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)


def _busy(message: str) -> Exception:
    # Imported where it is needed: the process that makes the memory serves nobody, and is small.
    from stageline_gateway.errors import ApiError

    return ApiError(503, message, "server_error", code="overloaded", retry_after_seconds=RETRY_AFTER_SECONDS)


@dataclass(slots=True)
class SharedMemory:
    """What the accounts of so many workers are in. Processes that are forked have it too."""

    workers: int
    most_accounts: int = MOST_ACCOUNTS
    descriptor: int = field(init=False)
    _memory: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.descriptor = os.memfd_create("stageline-gateway-turn", os.MFD_CLOEXEC)
        self._memory = memoryview(mmap.mmap(-1, self._accounts_at + self.most_accounts * self._account_bytes))

    @property
    def _accounts_at(self) -> int:
        return _HEAD_BYTES + self.most_accounts * _NAME_BYTES

    @property
    def _account_bytes(self) -> int:
        return (len(Held) * self.workers + NUM_SHARED) * _NUMBER_BYTES

    def forget(self, worker: int) -> None:
        """Give back what a worker held that has ended."""
        for index in range(self.num_accounts):
            account = self.account_at(index, worker)
            for kind in _GIVEN_BACK:
                account.put(kind, 0)

    @property
    def num_accounts(self) -> int:
        return self._memory[:_HEAD_BYTES].cast("q")[0]

    def account_at(self, index: int, worker: int) -> Account:
        begin = self._accounts_at + index * self._account_bytes
        border, end = begin + len(Held) * self.workers * _NUMBER_BYTES, begin + self._account_bytes
        held, shared = self._memory[begin:border].cast("q"), self._memory[border:end].cast("d")
        return Account(held, shared, worker, self.workers)

    def index_of(self, name: bytes) -> int:
        """The account of a name of `_NAME_BYTES`, which is there from now on. To be called in a turn."""
        count = self.num_accounts
        names = self._memory[_HEAD_BYTES : self._accounts_at]
        for index in range(count):
            if names[index * _NAME_BYTES : (index + 1) * _NAME_BYTES] == name:
                return index
        if count == self.most_accounts:
            raise _busy(f"This gateway has had {count} names of keys and models, and has room for no more.")
        names[count * _NAME_BYTES : (count + 1) * _NAME_BYTES] = name
        # Last: whoever is killed before leaves no half of an account.
        self._memory[:_HEAD_BYTES].cast("q")[0] = count + 1
        return count


@dataclass(slots=True)
class SharedBooks:
    """The books as one worker sees them. To be made in its own process."""

    memory: SharedMemory
    worker: int
    turn: Turn = field(init=False)
    _accounts: dict[tuple[str, str], Account] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turn = Turn(self.memory.descriptor)

    def account(self, kind: str, name: str) -> Account:
        found = self._accounts.get((kind, name))
        if found is None:
            written = blake2b(f"{kind}\0{name}".encode(), digest_size=_NAME_BYTES).digest()
            with self.turn:
                index = self.memory.index_of(written)
            found = self._accounts[kind, name] = self.memory.account_at(index, self.worker)
        return found
