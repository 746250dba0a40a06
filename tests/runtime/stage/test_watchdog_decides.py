"""When the watchdog ends a stage: an operation that took too long, or an engine that hung up and stays away."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from stageline_api.failures import FailureClass
from stageline_runtime.ranks.exchange_times import UnfinishedExchange
from stageline_runtime.stage.telemetry.cpu_waits import CpuWaits
from stageline_runtime.stage.telemetry.watchdog import ENGINE_GRACE_SECONDS, Watchdog
from stageline_runtime.termination import RuntimeFailure


class Engine:
    hung_up = False


def never(failure: RuntimeFailure) -> NoReturn:
    raise AssertionError(failure.detail)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def watchdog(engine: Engine) -> Watchdog:
    """A step may take 10 s; its thread isn't started."""
    return Watchdog(10.0, lambda: engine.hung_up, never)


def test_an_operation_that_takes_too_long(watchdog: Watchdog) -> None:
    before = time.monotonic()
    watchdog.watch(41, "receive hidden", 1)
    assert watchdog.failure_at(before + 10.0) is None
    failure = watchdog.failure_at(time.monotonic() + 10.01)
    assert failure is not None
    assert failure.failure_class is FailureClass.STEP_TIMEOUT
    assert (failure.step, failure.operation, failure.peer) == (41, "receive hidden", 1)
    assert failure.detail == "plan 41: receive hidden (stage 1) took longer than 10 s"


def test_compute_names_no_peer(watchdog: Watchdog) -> None:
    watchdog.watch(7, "forward", None)
    failure = watchdog.failure_at(time.monotonic() + 11)
    assert failure is not None
    assert (failure.peer, failure.detail) == (None, "plan 7: forward took longer than 10 s")


def test_a_new_operation_and_rest_start_over(watchdog: Watchdog) -> None:
    watchdog.watch(1, "forward", None)
    first = time.monotonic()
    while time.monotonic() <= first:
        pass
    watchdog.watch(1, "send hidden", 1)
    assert watchdog.failure_at(first + 10.0) is None
    watchdog.rest()
    assert watchdog.failure_at(time.monotonic() + 1000) is None


def test_an_engine_that_hung_up_has_some_grace(watchdog: Watchdog, engine: Engine) -> None:
    engine.hung_up = True
    assert watchdog.failure_at(100.0) is None
    assert watchdog.failure_at(100.0 + ENGINE_GRACE_SECONDS) is None
    failure = watchdog.failure_at(100.1 + ENGINE_GRACE_SECONDS)
    assert failure is not None
    assert failure.failure_class is FailureClass.ENGINE_LOST


def test_grace_starts_anew_when_the_engine_is_there(watchdog: Watchdog, engine: Engine) -> None:
    engine.hung_up = True
    assert watchdog.failure_at(100.0) is None
    engine.hung_up = False
    assert watchdog.failure_at(200.0) is None
    engine.hung_up = True
    assert watchdog.failure_at(201.0) is None
    assert watchdog.failure_at(201.0 + ENGINE_GRACE_SECONDS) is None


@pytest.mark.parametrize(
    ("watched", "unfinished", "told"),
    [
        (("forward", None), UnfinishedExchange("all-reduce, layer 7", (1, 3)), ("all-reduce, layer 7", None, 1)),
        (("forward", None), UnfinishedExchange("all-reduce, layer 7", ()), ("all-reduce, layer 7", None, None)),
        (("receive hidden", 0), UnfinishedExchange("all-gather, hidden", (2,)), ("all-gather, hidden", None, 2)),
        (("receive hidden", 0), UnfinishedExchange("all-gather, hidden", ()), ("receive hidden", 0, None)),
        (("receive hidden", 0), None, ("receive hidden", 0, None)),
    ],
)
def test_on_a_device_the_exchange_that_it_is_not_past_is_named(
    watchdog: Watchdog,
    watched: tuple[str, int | None],
    unfinished: UnfinishedExchange | None,
    told: tuple[str, int | None, int | None],
) -> None:
    """A peer stage that is waited for comes first, unless a rank of this stage is known to be late."""
    watchdog.unfinished = lambda: unfinished
    watchdog.watch(5, *watched)
    failure = watchdog.failure_at(time.monotonic() + 11)
    assert failure is not None
    assert (failure.operation, failure.peer, failure.rank) == told, failure
    operation, peer, rank = told
    late = "" if unfinished is None or rank is None else f" (without rank {', '.join(map(str, unfinished.late))})"
    towards = late if peer is None else f" (stage {peer})"
    assert failure.detail == f"plan 5: {operation}{towards} took longer than 10 s"


def test_a_part_of_the_start_has_a_limit_of_its_own(watchdog: Watchdog) -> None:
    watchdog.watch_start("join the ranks", 60.0)
    assert watchdog.failure_at(time.monotonic() + 59) is None
    failure = watchdog.failure_at(time.monotonic() + 61)
    assert failure is not None
    told = (failure.failure_class, failure.step, failure.detail)
    assert told == (FailureClass.RENDEZVOUS_TIMEOUT, None, "join the ranks took longer than 60 s")


class Waits(CpuWaits):
    """A busy machine: each look, this process had no CPU for so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def look(self) -> float:
        return self.seconds


def looked_at(watchdog: Watchdog, began: float, seconds: int) -> None:
    """Poll each half second."""
    for half in range(2 * seconds):
        watchdog.look(began + half / 2)


def test_time_without_a_cpu_does_not_count() -> None:
    watchdog = Watchdog(10.0, lambda: False, never, cpu_waits=Waits(0.4))
    began = time.monotonic()
    watchdog.watch(7, "forward", None)
    looked_at(watchdog, began, 40)
    assert watchdog.failure_at(began + 40) is None, "it computed for 8 s of them"
    looked_at(watchdog, began + 40, 20)
    failure = watchdog.failure_at(began + 60)
    assert failure is not None
    assert failure.detail == "plan 7: forward took longer than 10 s"


def test_no_more_than_the_time_that_passed_is_taken_off() -> None:
    """A thread that has waited long before is looked at for the first time."""
    watchdog = Watchdog(10.0, lambda: False, never, cpu_waits=Waits(1000.0))
    began = time.monotonic()
    watchdog.watch(7, "forward", None)
    watchdog.look(began)
    watchdog.look(began + 1)
    assert watchdog.failure_at(began + 13) is not None


def test_a_wait_for_another_rank_is_not_longer_on_a_busy_machine() -> None:
    """A rank that waits in an exchange takes turns on the CPU; the one that it waits for may be stopped."""
    late: list[tuple[int, ...]] = [(1,)]
    watchdog = Watchdog(10.0, lambda: False, never, late_ranks=lambda: late[0], cpu_waits=Waits(0.4))
    watchdog.watch(7, "forward", None)
    watchdog.exchange("all-reduce")
    began = time.monotonic()
    looked_at(watchdog, began, 11)
    failure = watchdog.failure_at(began + 11)
    assert failure is not None
    assert failure.detail == "plan 7: all-reduce (without rank 1) took longer than 10 s"
    late[0] = ()
    watchdog.exchange("all-reduce")
    began = time.monotonic()
    looked_at(watchdog, began, 11)
    assert watchdog.failure_at(began + 11) is None, "all ranks came: it computes what follows the exchange"


def test_a_step_that_goes_on_is_told_to_others_and_a_wait_for_them_is_not() -> None:
    told = list[int]()
    watchdog = Watchdog(10.0, lambda: False, never, tell_computing=told.append, cpu_waits=Waits(0.4))
    began = time.monotonic()
    watchdog.watch(7, "forward", None)
    looked_at(watchdog, began, 6)
    assert told == [7, 7]
    watchdog.watch(8, "receive hidden", 0)
    looked_at(watchdog, began, 9)
    watchdog.exchange("all-reduce")
    looked_at(watchdog, began, 9)
    watchdog.rest()
    looked_at(watchdog, began, 9)
    assert told == [7, 7]


@pytest.mark.parametrize("is_exchange", [False, True])
def test_a_wait_goes_on_while_another_stage_says_that_it_computes(is_exchange: bool) -> None:
    heard = [float("-inf")]
    watchdog = Watchdog(10.0, lambda: False, never, peer_computed_at=lambda: heard[0])
    began = time.monotonic()
    watchdog.watch(7, "receive hidden", 0)
    if is_exchange:
        watchdog.exchange("all-reduce")
    heard[0] = began + 9
    assert watchdog.failure_at(began + 18) is None
    assert watchdog.failure_at(began + 20) is not None
    watchdog.watch(8, "forward", None)
    assert watchdog.failure_at(time.monotonic() + 11) is not None, "what others do excuses no step of its own"


def test_the_kernel_tells_for_how_long_a_thread_had_no_cpu() -> None:
    """Two threads of two processes on one core: one of them always waits."""
    allowed = os.sched_getaffinity(0)
    one_core = {min(allowed)}
    spinner = subprocess.Popen(
        [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {one_core})\nwhile True: pass"]
    )
    is_over = threading.Event()

    def compute() -> None:
        os.sched_setaffinity(0, one_core)
        while not is_over.is_set():
            pass

    computing = threading.Thread(target=compute)
    computing.start()
    try:
        waits, waited, deadline = CpuWaits(), 0.0, time.monotonic() + 60
        while waited < 0.1:
            assert time.monotonic() < deadline, f"waited {waited} s"
            time.sleep(0.01)
            waited += waits.look()
    finally:
        is_over.set()
        computing.join()
        spinner.kill()
        spinner.wait()


def test_a_kernel_that_tells_nothing_has_nobody_wait(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert CpuWaits(tmp_path).look() == 0.0
