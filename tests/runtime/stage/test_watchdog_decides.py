"""When the watchdog ends a stage: an operation that took too long, or an engine that hung up and stays away."""

import time
from typing import NoReturn

import pytest

from stageline_api.failures import FailureClass
from stageline_runtime.ranks.exchange_times import UnfinishedExchange
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
