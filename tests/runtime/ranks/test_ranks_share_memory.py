"""Exchanges between real processes through one mapped area; what a rank sees when another goes, stops or differs."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stageline_runtime.ranks.rank_area import RankArea
from stageline_runtime.ranks.shared_memory import SharedMemoryRanks

FORK = multiprocessing.get_context("fork")
LONGEST_SECONDS = 60.0
BUFFER_BYTES = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Work = Callable[[SharedMemoryRanks], object]


class Ranks:
    """A process for each rank, which runs `work` and says what it returned or why it failed."""

    def __init__(self, size: int, work: Work, buffer_bytes: int = BUFFER_BYTES, core: int | None = None) -> None:
        self.descriptor = RankArea.create(size, buffer_bytes)
        self.area = RankArea(self.descriptor)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = FORK.Pipe(duplex=False)
            process = FORK.Process(target=self._run, args=(rank, work, theirs, core), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def _run(self, rank: int, work: Work, pipe: Connection, core: int | None) -> None:
        torch.set_num_threads(1)
        if core is not None:
            os.sched_setaffinity(0, {core})
        try:
            pipe.send(work(SharedMemoryRanks(RankArea(self.descriptor), rank)))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")

    def answer(self, rank: int) -> object:
        assert self.pipes[rank].poll(LONGEST_SECONDS), f"rank {rank} says nothing; {self.processes}"
        return self.pipes[rank].recv()

    def answers(self) -> list[object]:
        return [self.answer(rank) for rank in range(len(self.pipes))]

    def wait_begun(self) -> None:
        """Until every rank has come to an exchange."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while not all(self.area.rounds()):
            assert time.monotonic() < deadline, self.area.rounds()
            time.sleep(0.01)

    def close(self) -> None:
        self.area.end()
        for process in self.processes:
            process.kill()
            process.join()
        self.area.close()
        os.close(self.descriptor)


@contextmanager
def ranks_at_work(size: int, work: Work, buffer_bytes: int = BUFFER_BYTES, core: int | None = None) -> Iterator[Ranks]:
    ranks = Ranks(size, work, buffer_bytes, core)
    try:
        yield ranks
    finally:
        ranks.close()


def numbers_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def bits(tensor: Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(tensor.shape), bytes(tensor.contiguous().view(torch.uint8).numpy())


def summed(parts: list[Tensor]) -> Tensor:
    """In the order of the ranks and in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@given(
    size=st.integers(1, 4),
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
)
def test_every_rank_gets_the_same_sums_and_parts_whatever_fits_into_a_buffer(
    size: int, shapes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    def work(ranks: SharedMemoryRanks) -> object:
        results = []
        for number, shape in enumerate(shapes):
            mine = numbers_of(ranks.rank + 10 * number, shape, dtype)
            parts = numbers_of(ranks.rank + 10 * number, (size, *shape), dtype)
            results.append(bits(ranks.all_gather(mine, "gather")))
            results.append(bits(ranks.reduce_scatter(parts, "scatter")))
            results.append(bits(ranks.all_reduce(mine.clone(), "reduce")))
        return results

    with ranks_at_work(size, work, buffer_bytes=640) as ranks:
        answers = ranks.answers()
    for rank, answer in enumerate(answers):
        expected = []
        for number, shape in enumerate(shapes):
            given_by = [numbers_of(each + 10 * number, shape, dtype) for each in range(size)]
            parts = [numbers_of(each + 10 * number, (size, *shape), dtype) for each in range(size)]
            expected.append(bits(torch.stack(given_by)))
            expected.append(bits(summed([part[rank] for part in parts])))
            expected.append(bits(summed(given_by)))
        assert answer == expected, f"rank {rank} of {size}"


def test_tokens_cross_as_they_are() -> None:
    def work(ranks: SharedMemoryRanks) -> object:
        return ranks.all_gather(torch.tensor([[ranks.rank, 2**40 + ranks.rank]]), "tokens").tolist()

    with ranks_at_work(2, work) as ranks:
        assert ranks.answers() == [[[[0, 2**40]], [[1, 2**40 + 1]]]] * 2


def test_two_ranks_on_one_core_get_on() -> None:
    def work(ranks: SharedMemoryRanks) -> object:
        for _ in range(300):
            rows = ranks.all_reduce(torch.ones(8), "reduce")
        return rows.tolist()

    core = min(os.sched_getaffinity(0))
    with ranks_at_work(2, work, core=core) as ranks:
        assert ranks.answers() == [[2.0] * 8] * 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda ranks: ranks.all_reduce(torch.ones(9), "all-reduce, layer 7"), "all-reduce of 9 elements"),
        (lambda ranks: ranks.all_reduce(torch.ones(8), "all-reduce, layer 8"), "all-reduce, layer 8"),
        (lambda ranks: ranks.all_gather(torch.ones(8), "all-reduce, layer 7"), "all-gather of 8 elements"),
        (lambda ranks: ranks.all_reduce(torch.ones(8).half(), "all-reduce, layer 7"), "RankMismatchError"),
    ],
    ids=["shape", "name", "kind", "type"],
)
def test_ranks_that_differ_are_both_named(other: Callable[[SharedMemoryRanks], Tensor], words: str) -> None:
    def work(ranks: SharedMemoryRanks) -> object:
        return (ranks.all_reduce(torch.ones(8), "all-reduce, layer 7") if ranks.rank == 0 else other(ranks)).tolist()

    with ranks_at_work(2, work) as ranks:
        answers = [str(answer) for answer in ranks.answers()]
    assert all(answer.startswith("RankMismatchError") for answer in answers), answers
    assert "rank 0 is at all-reduce, layer 7 (all-reduce of 8 elements), rank 1 at" in answers[0]
    assert words in answers[0]


def exchange_for_ever(ranks: SharedMemoryRanks) -> object:
    while True:
        ranks.all_reduce(torch.ones(8), "all-reduce, layer 7, attention")


def test_a_rank_that_waits_for_a_killed_one_is_freed_when_the_area_ends() -> None:
    with ranks_at_work(3, exchange_for_ever) as ranks:
        ranks.processes[1].kill()
        ranks.processes[1].join()
        ranks.area.end()
        words = "RanksEndedError: all-reduce, layer 7, attention: another rank of the stage has ended"
        assert (ranks.answer(0), ranks.answer(2)) == (words, words)


def test_a_rank_that_waits_for_a_stopped_one_hears_signals_and_goes_on_with_it() -> None:
    def work(ranks: SharedMemoryRanks) -> object:
        heard: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
        while not heard:
            ranks.all_reduce(torch.ones(8), "reduce")
            agreed = ranks.all_gather(torch.tensor([len(heard)]), "who heard")
            if agreed.sum():
                break
        return len(heard)

    with ranks_at_work(2, work) as ranks:
        stopped, waiting = ranks.processes[1].pid, ranks.processes[0].pid
        assert stopped is not None
        assert waiting is not None
        ranks.wait_begun()
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(0.2)  # the other is in its wait by now; if it weren't, the test would pass all the same
        os.kill(waiting, signal.SIGUSR1)
        assert not ranks.pipes[0].poll(0.3), "an answer without the stopped rank"
        os.kill(stopped, signal.SIGCONT)
        assert ranks.answer(0) == 1


@pytest.mark.parametrize(("size", "buffer_bytes"), [(0, 4096), (2, 8)])
def test_an_area_that_holds_nothing_is_refused(size: int, buffer_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"an area of {size} ranks with buffers of {buffer_bytes} bytes"):
        RankArea.create(size, buffer_bytes)


def test_other_memory_is_no_area() -> None:
    descriptor = os.memfd_create("something-else")
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ValueError, match="is no area of ranks"):
        RankArea(descriptor)
    os.close(descriptor)


def test_what_the_area_cannot_do_is_refused() -> None:
    descriptor = RankArea.create(1, BUFFER_BYTES)
    with pytest.raises(ValueError, match="rank 1 is not one of 1"):
        SharedMemoryRanks(RankArea(descriptor), 1)
    ranks = SharedMemoryRanks(RankArea(descriptor), 0)
    with pytest.raises(TypeError, match=r"not of torch\.int64"):
        ranks.all_reduce(torch.ones(3, dtype=torch.int64), "reduce")
    with pytest.raises(ValueError, match="scatter: 2 parts for 1 ranks"):
        ranks.reduce_scatter(torch.ones(2, 3), "scatter")
    ranks.close()
    os.close(descriptor)


def test_the_watchdog_is_told_each_exchange() -> None:
    descriptor = RankArea.create(1, BUFFER_BYTES)
    told: list[str] = []
    ranks = SharedMemoryRanks(RankArea(descriptor), 0, told.append)
    ranks.all_reduce(torch.ones(3), "all-reduce, layer 0, attention")
    ranks.all_gather(torch.ones(3), "all-gather, logits")
    assert told == ["all-reduce, layer 0, attention", "all-gather, logits"]
    ranks.close()
    os.close(descriptor)
