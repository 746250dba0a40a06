"""Limits in memory that processes share: what each holds, who decides, and what is left of a process that is gone."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from stageline_gateway.admission.accounts import Held
from stageline_gateway.admission.keys import KeyUse, Limits
from stageline_gateway.admission.shared_books import SharedBooks, SharedMemory
from stageline_gateway.errors import ApiError

RATED = Limits.model_validate({"requestsPerMinute": 200, "tokensPerMinute": 100, "concurrency": 3})


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(2, most_accounts=4)


@contextlib.contextmanager
def another_process(work: Callable[[], None]) -> Iterator[int]:
    """A fork that does `work` and is stopped then; killed when the context ends."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(0)
    try:
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def use_of(books: SharedBooks, name: str = "key") -> KeyUse:
    return KeyUse(books.account("key", name))


def test_what_two_workers_use_is_one_keys_use(memory: SharedMemory) -> None:
    one, other = (use_of(SharedBooks(memory, worker)) for worker in (0, 1))
    for use in (one, other):
        use.follow(RATED, 0.0)
        use.arrive()
        use.has_arrived()
        use.begin()
        use.spend(40)
    other.follow(RATED, 0.0)
    assert other.exceeded(places=1) is None
    exceeded = other.exceeded(places=2)
    assert exceeded is not None
    assert exceeded.limit == "concurrency"
    assert [each.remaining for each in one.allowances(RATED, 0.0)] == [198, 20]
    one.spend(20)
    exceeded = other.exceeded()
    assert exceeded is not None
    assert exceeded.limit == "tokensPerMinute", "tokens count as soon as they are spent, in whichever process"


def test_requests_of_processes_that_race_are_all_counted(memory: SharedMemory) -> None:
    """Each takes as many as it may; together they get what there is."""

    def take_all(worker: int) -> int:
        books = SharedBooks(memory, worker)
        use, taken = use_of(books), 0
        for _ in range(300):
            with books.turn:
                use.follow(RATED, 0.0)
                if use.exceeded() is None:
                    use.arrive()
                    taken += 1
            use.account.put(Held.ARRIVING, 0)
        return taken

    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = take_all(1)
        finally:
            os._exit(status)
    mine = take_all(0)
    _, status = os.waitpid(pid, 0)
    assert mine + os.waitstatus_to_exitcode(status) == 200


def test_a_worker_that_is_killed_in_its_turn_gives_it_back(memory: SharedMemory) -> None:
    books = SharedBooks(memory, 0)
    account = books.account("key", "x")

    def hold() -> None:
        mine = SharedBooks(memory, 1)
        held = mine.account("key", "x")
        mine.turn.__enter__()
        held.add(Held.PLACES, 3)
        held.add(Held.SPENT_TOKENS, 5)

    with another_process(hold) as pid:
        books.turn.patience_seconds = 0.01
        for _ in range(2):
            with pytest.raises(ApiError) as refused, books.turn:
                pass
            assert (refused.value.status, refused.value.code) == (503, "overloaded")
        assert account.total(Held.PLACES) == 3, "what was let in can be told and given back without a turn"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with books.turn:
            memory.forget(1)
        assert (account.total(Held.PLACES), account.total(Held.SPENT_TOKENS)) == (0, 5)


def test_a_name_has_one_account_in_all_workers_and_there_are_so_many(memory: SharedMemory) -> None:
    one, other = SharedBooks(memory, 0), SharedBooks(memory, 1)
    for name in "abcd":
        one.account("key", name).add(Held.PLACES, 1)
        other.account("key", name).add(Held.PLACES, 2)
    assert [one.account("key", name).total(Held.PLACES) for name in "abcd"] == [3] * 4
    for kind, name in (("key", "e"), ("model", "a")):
        with pytest.raises(ApiError, match="has had 4 names"):
            other.account(kind, name)
    with other.turn:
        pass  # refusing left it free
