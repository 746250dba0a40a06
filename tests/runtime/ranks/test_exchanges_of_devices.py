"""Exchanges of ranks that have a device each: between real processes over gloo, and on a device that is always late."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from oracles.simulated_accelerator import ImmediateAccelerator, SimulatedAccelerator
from processes.gloo_ranks import GlooRanks
from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.nccl import NcclRanks
from stageline_runtime.ranks.device_ranks import MOST_KEPT, TIMED_EVERY, DeviceRanks
from stageline_runtime.ranks.device_rendezvous import RankMeeting, join_device_ranks
from stageline_runtime.ranks.errors import RanksEndedError
from stageline_runtime.ranks.exchange_times import ExchangeTimes, UnfinishedExchange
from stageline_runtime.ranks.rank_area import RankArea
from stageline_runtime.termination import RuntimeFailure

FORK = multiprocessing.get_context("fork")
LONGEST_SECONDS = 60.0
JOIN_SECONDS = 30.0

Work = Callable[[DeviceRanks], object]


class Ranks:
    """A process for each rank, which joins the others, runs `work` and says what it returned or why it failed."""

    def __init__(self, path: Path, size: int, work: Work, join_seconds: float, stopped: int | None) -> None:
        self.descriptor = RankArea.create(size, 4096)
        self.area = RankArea(self.descriptor)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = FORK.Pipe(duplex=False)
            arguments = (str(path / "meeting"), rank, work, theirs, join_seconds, stopped)
            process = FORK.Process(target=self._run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def _run(
        self, path: str, rank: int, work: Work, pipe: Connection, join_seconds: float, stopped: int | None
    ) -> None:
        torch.set_num_threads(1)
        try:
            area = RankArea(self.descriptor)
            meeting = RankMeeting(path, area, stage=3, rank=rank, timeout_seconds=join_seconds)
            ranks = join_device_ranks(
                meeting,
                GlooRanks(stopped),
                ImmediateAccelerator(),
                timeout_seconds=join_seconds,
                step_timeout_seconds=join_seconds,
            )
            pipe.send(work(ranks))
        except RuntimeFailure as failure:
            pipe.send((failure.failure_class, failure.rank, failure.detail))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")

    def answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(LONGEST_SECONDS), f"rank {rank} says nothing; {self.processes}"
        return self.pipes[rank].recv()

    def wait_come(self, rounds: int) -> None:
        """Until every rank has come to so many exchanges."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while self.area.ranks_before(rounds):
            assert time.monotonic() < deadline, self.area.rounds()
            time.sleep(0.01)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.area.close()
        os.close(self.descriptor)


@contextmanager
def ranks_at_work(
    path: Path, size: int, work: Work, join_seconds: float = JOIN_SECONDS, stopped: int | None = None
) -> Iterator[Ranks]:
    ranks = Ranks(path, size, work, join_seconds, stopped)
    try:
        yield ranks
    finally:
        ranks.close()


def numbers_of(rank: int, *shape: int) -> Tensor:
    """Whole ones, so that no order of a sum changes it."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_gets_the_same_sums_and_parts(size: int, tmp_path: Path) -> None:
    shapes = ((1, 5), (0, 4), (7, 64))

    def work(ranks: DeviceRanks) -> object:
        results = []
        for shape in shapes:
            columns = numbers_of(ranks.rank, shape[1], shape[0]).T  # laid out otherwise than a communicator asks for
            results.append(ranks.all_gather(columns, "gather").tolist())
            results.append(ranks.all_reduce(columns, "reduce").tolist())
            results.append(ranks.reduce_scatter(numbers_of(ranks.rank, size, *shape), "scatter").tolist())
        tokens = torch.tensor([[ranks.rank, 2**40 + ranks.rank]])
        return [*results, ranks.all_gather(tokens, "tokens").tolist(), ranks.unfinished()]

    with ranks_at_work(tmp_path, size, work) as ranks:
        answers = [ranks.answer(rank) for rank in range(size)]
    for rank, answer in enumerate(answers):
        expected: list[object] = []
        for shape in shapes:
            columns = [numbers_of(each, shape[1], shape[0]).T for each in range(size)]
            parts = [numbers_of(each, size, *shape)[rank] for each in range(size)]
            expected += [torch.stack(columns).tolist(), torch.stack(columns).sum(0).tolist()]
            expected.append(torch.stack(parts).sum(0).tolist())
        assert answer == [*expected, [[[each, 2**40 + each]] for each in range(size)], None], f"rank {rank}"


def sum_for_ever(ranks: DeviceRanks) -> object:
    while True:
        ranks.all_reduce(torch.ones(8), "all-reduce, layer 7, attention")


def test_a_killed_rank_ends_the_exchange_of_the_others(tmp_path: Path) -> None:
    with ranks_at_work(tmp_path, 3, sum_for_ever) as ranks:
        ranks.wait_come(5)
        ranks.processes[1].kill()
        answers = (ranks.answer(0), ranks.answer(2))
        assert all(answer.startswith("RanksEndedError: all-reduce, layer 7, attention: ") for answer in answers), (
            answers
        )


def test_a_rank_that_waits_for_a_stopped_one_can_name_it(tmp_path: Path) -> None:
    """The host waits within the exchange; a watchdog's thread asks."""
    stopped_at = 40

    def work(ranks: DeviceRanks) -> object:
        import threading

        said: list[object] = []

        def look() -> None:
            while (found := ranks.unfinished()) is None or not found.late:
                time.sleep(0.01)
            said.append(found)

        for _ in range(stopped_at):
            ranks.all_reduce(torch.ones(8), "reduce")
        if ranks.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        watcher = threading.Thread(target=look)
        watcher.start()
        threading.Thread(target=lambda: ranks.all_reduce(torch.ones(8), "all-reduce, layer 7"), daemon=True).start()
        watcher.join(LONGEST_SECONDS)
        return said

    with ranks_at_work(tmp_path, 3, work) as ranks:
        for rank in (0, 1):
            (found,) = ranks.answer(rank)
            assert found.operation == "all-reduce, layer 7"
            assert 2 in found.late, found


def test_a_rank_that_never_comes_is_named_by_those_that_do(tmp_path: Path) -> None:
    area = RankArea(RankArea.create(3, 4096))
    meetings = [
        RankMeeting(str(tmp_path / "meeting"), area, stage=3, rank=rank, timeout_seconds=1.0) for rank in (0, 2)
    ]
    meetings[0].store.set("join the ranks/0", "here")
    with pytest.raises(RuntimeFailure) as late:
        meetings[1].meet("join the ranks", 0.1, FailureClass.RENDEZVOUS_TIMEOUT)
    told = (late.value.failure_class, late.value.rank, late.value.detail)
    words = "stage 3, rank 2 waited for rank 1 to join the ranks for 0.1 s"
    assert told == (FailureClass.RENDEZVOUS_TIMEOUT, 1, words)
    area.end()
    with pytest.raises(RanksEndedError, match="join the ranks: another rank of the stage has ended"):
        meetings[1].meet("join the ranks", 60.0, FailureClass.RENDEZVOUS_TIMEOUT)
    area.close()


def test_a_rank_that_stands_still_as_it_joins_keeps_nobody_for_ever(tmp_path: Path) -> None:
    with ranks_at_work(tmp_path, 2, sum_for_ever, join_seconds=2.0, stopped=1) as ranks:
        failure_class, _, detail = ranks.answer(0)
        assert failure_class is FailureClass.RENDEZVOUS_TIMEOUT, detail
        assert detail.startswith("stage 3, rank 0 can't exchange by gloo: "), detail


def test_a_rank_killed_while_they_join_lets_the_others_go(tmp_path: Path) -> None:
    with ranks_at_work(tmp_path, 2, sum_for_ever, join_seconds=3.0, stopped=1) as ranks:
        ranks.processes[1].kill()
        assert ranks.answer(0)[0] in (FailureClass.RENDEZVOUS_TIMEOUT, FailureClass.PEER_LOST)


class QueuedGroup:
    """A communicator of one device in disguise, whose exchanges run when the stream comes to them."""

    def __init__(self, device: SimulatedAccelerator) -> None:
        self.device = device
        self.waits_for_others = False
        self.is_aborted = False
        self.failure: str | None = None
        self.done: list[str] = []

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        """As `ProcessGroupNCCL` has it: what is queued on the active stream has no work to wait for."""
        assert not options.asyncOp, "it would run on a stream of its own"
        (rows,) = tensors

        def run() -> bool:
            if self.waits_for_others and not self.is_aborted:
                return False
            rows.mul_(2)
            return True

        self.device.current.tasks.append(run)

    def abort(self) -> None:
        self.is_aborted = True


class QueuedRanks:
    name = "queued"

    def error(self, group: QueuedGroup) -> str | None:
        return group.failure


def queued_ranks(seed: int = 1) -> tuple[DeviceRanks, QueuedGroup, RankArea]:
    device = SimulatedAccelerator(seed)
    group, area = QueuedGroup(device), RankArea(RankArea.create(2, 4096))
    return DeviceRanks(group, cast(Any, QueuedRanks()), device, area, 0), group, area


def test_the_host_goes_on_and_the_oldest_exchange_that_the_device_is_not_past_has_a_name() -> None:
    ranks, group, area = queued_ranks()
    group.waits_for_others = True
    told: list[str] = []
    ranks.observe = told.append
    rows = [ranks.all_reduce(torch.ones(2), f"all-reduce, layer {layer}") for layer in range(3)]
    assert told == [f"all-reduce, layer {layer}" for layer in range(3)]
    assert [each.tolist() for each in rows] == [[1.0, 1.0]] * 3, "nothing has run yet"
    assert ranks.unfinished() == UnfinishedExchange("all-reduce, layer 0", (1,)), "the other has come to none"
    area.tell(1, 1)
    assert ranks.unfinished() == UnfinishedExchange("all-reduce, layer 0", ()), "both have: what keeps it is not known"
    group.waits_for_others = False
    group.device.synchronize()
    assert ranks.unfinished() is None
    assert [each.tolist() for each in rows] == [[2.0, 2.0]] * 3


def test_one_exchange_of_seven_is_timed_by_the_device_wait_included_and_stands_for_all() -> None:
    ranks, group, _ = queued_ranks(3)
    for number in range(TIMED_EVERY - 1):
        ranks.all_reduce(torch.ones(1), str(number))
    group.device.synchronize()
    ranks.check()
    assert ranks.times == ExchangeTimes(), "none of these"
    group.waits_for_others = True
    ranks.all_reduce(torch.ones(1), "the seventh")
    before = group.device.now()
    for _ in range(200):
        group.device.run_one()
    ranks.check()
    assert ranks.times == ExchangeTimes(), "it is under way"
    group.waits_for_others = False
    group.device.synchronize()
    ranks.check()
    assert ranks.times.count == TIMED_EVERY
    waited = group.device.now() - before
    assert 0.9 * waited * TIMED_EVERY <= ranks.times.seconds <= waited * TIMED_EVERY


def test_what_is_exchanged_beside_the_compute_is_not_counted_as_part_of_it() -> None:
    ranks, group, _ = queued_ranks(3)
    with ranks.times.beside_compute():
        for number in range(2 * TIMED_EVERY):
            ranks.all_reduce(torch.ones(1), str(number))
    group.device.synchronize()
    ranks.check()
    assert ranks.times == ExchangeTimes()


def test_an_end_of_another_rank_and_an_error_of_the_communicator_are_found_without_waiting() -> None:
    ranks, group, area = queued_ranks()
    ranks.check()
    group.waits_for_others = True
    ranks.all_reduce(torch.ones(2), "all-reduce, layer 4")
    group.failure = "NCCL reported REMOTE_ERROR; its own words are in the log"
    with pytest.raises(RanksEndedError, match="all-reduce, layer 4: rank 0: NCCL reported REMOTE_ERROR"):
        ranks.check()
    group.failure = None
    area.end()
    with pytest.raises(RanksEndedError, match="all-reduce, layer 4: another rank of the stage has ended"):
        ranks.check()
    ranks.close()
    group.device.synchronize()
    assert ranks.unfinished() is None, "what was under way has been given up"


def test_what_is_remembered_stays_bounded_and_forgets_nothing_that_is_under_way() -> None:
    ranks, group, _ = queued_ranks(2)
    for number in range(5 * MOST_KEPT):
        ranks.all_reduce(torch.ones(1), str(number))
        if number % 100 == 0:
            group.device.synchronize()
    assert len(ranks._queued) <= MOST_KEPT + 1
    group.device.synchronize()
    group.waits_for_others = True
    for number in range(2 * MOST_KEPT):
        ranks.all_reduce(torch.ones(1), f"later {number}")
    found = ranks.unfinished()
    assert found is not None
    assert found.operation == "later 0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_nccl_that_can_not_be_had_is_told_in_a_sentence(tmp_path: Path) -> None:
    area = RankArea(RankArea.create(1, 4096))
    meeting = RankMeeting(str(tmp_path / "meeting"), area, stage=0, rank=0, timeout_seconds=1.0)
    with pytest.raises(RuntimeFailure) as refused:
        join_device_ranks(meeting, NcclRanks(), ImmediateAccelerator(), timeout_seconds=1.0, step_timeout_seconds=1.0)
    assert refused.value.failure_class is FailureClass.PEER_LOST
    assert refused.value.detail.startswith("stage 0, rank 0 can't exchange by NCCL: "), refused.value
    assert "\n" not in refused.value.detail
    area.close()


def test_torchs_process_groups_offer_what_is_used_of_them() -> None:
    from torch._C import _distributed_c10d as c10d

    used = ("allreduce", "_allgather_base", "_reduce_scatter_base", "abort", "eager_connect_single_device")
    assert [name for name in used if not hasattr(c10d.Backend, name)] == []
    if hasattr(c10d, "ProcessGroupNCCL"):
        assert hasattr(c10d.ProcessGroupNCCL, "get_error")
    for options in (c10d.AllreduceOptions, c10d.AllgatherOptions, c10d.ReduceScatterOptions):
        assert options().asyncOp in (True, False), options
