"""Clock offsets and link latencies from pings: right within half a round trip, for any delays and any offset."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.engine.group.stage_probe import (
    KEPT_EXCHANGES,
    LOST_NANOSECONDS,
    PING_NANOSECONDS,
    LinkLatency,
    StageClocks,
    exchange,
)
from stageline_runtime.plan_bus.messages import PlanMoments, Pong

NANOSECONDS = st.integers(0, 10**10)


def pong_after(sent: int, outward: int, held: int, offset: int) -> Pong:
    """A stage whose clock is ahead by `offset` got the ping after `outward` and kept it for `held`."""
    received = sent + outward + offset
    return Pong(sent, received, received + held, ())


@given(NANOSECONDS, NANOSECONDS, NANOSECONDS, NANOSECONDS, st.integers(-(10**12), 10**12))
def test_offset_is_off_by_at_most_half_the_round_trip(
    sent: int, outward: int, held: int, homeward: int, offset: int
) -> None:
    now = sent + outward + held + homeward
    found = exchange(pong_after(sent, outward, held, offset), now)
    assert found.round_trip_nanoseconds == outward + homeward
    assert abs(found.offset_nanoseconds - offset) <= found.error_at(now) + 1  # whole nanoseconds


@given(st.lists(st.tuples(NANOSECONDS, NANOSECONDS), min_size=1, max_size=80), st.integers(-(10**12), 10**12))
def test_reported_error_bounds_the_offset_with_drifting_clocks(delays: list[tuple[int, int]], offset: int) -> None:
    """The stage's clock runs 30 ppm fast; after any exchanges the reported bound still holds."""
    clocks = StageClocks()
    now = 0

    def stage_clock(at: int) -> int:
        return at + offset + at * 30 // 1_000_000

    for outward, homeward in delays:
        sent = now
        received = stage_clock(sent + outward)
        now = sent + outward + homeward
        clocks.answered(3, Pong(sent, received, received, ()), now)
        now += PING_NANOSECONDS
    (told,) = clocks.report(now).stages
    assert told.stage == 3
    assert abs(told.offset_nanoseconds - (stage_clock(now) - now)) <= told.error_nanoseconds + 3  # whole nanoseconds


def test_the_quickest_of_the_last_exchanges_counts() -> None:
    clocks = StageClocks()
    for round_trip in (900, 20, 400):
        clocks.answered(0, pong_after(0, round_trip, 0, 50), round_trip)
    best = clocks.best(0, 1000)
    assert best is not None
    assert best.round_trip_nanoseconds == 20
    for _ in range(KEPT_EXCHANGES):
        clocks.answered(0, pong_after(0, 300, 0, 50), 300)
    best = clocks.best(0, 1000)
    assert best is not None
    assert best.round_trip_nanoseconds == 300


def test_a_quick_exchange_loses_to_a_fresh_one_with_age() -> None:
    clocks = StageClocks()
    clocks.answered(0, pong_after(0, 1_000, 0, 0), 1_000)
    later = 10**12
    clocks.answered(0, pong_after(later, 2_000_000, 0, 0), later + 2_000_000)
    best = clocks.best(0, later + 2_000_000)
    assert best is not None
    assert best.round_trip_nanoseconds == 2_000_000


def test_one_question_is_out_at_a_time_and_a_lost_one_is_asked_again() -> None:
    clocks = StageClocks()
    assert clocks.due(1, 0)
    assert not clocks.due(1, PING_NANOSECONDS)
    assert clocks.due(2, 0)
    assert clocks.due(1, LOST_NANOSECONDS)
    clocks.answered(1, pong_after(LOST_NANOSECONDS, 10, 0, 0), LOST_NANOSECONDS + 10)
    assert not clocks.due(1, LOST_NANOSECONDS + 11)
    assert clocks.due(1, LOST_NANOSECONDS + PING_NANOSECONDS)


def moments(
    seq: int,
    *,
    receive: tuple[int, int] | None = None,
    send: int | None = None,
    feedback_send: int | None = None,
    feedback: tuple[int, int] | None = None,
) -> PlanMoments:
    """`feedback` is (through, moment)."""
    return PlanMoments(
        seq=seq,
        feedback_through=-1 if feedback is None else feedback[0],
        receive_began=None if receive is None else receive[0],
        received=None if receive is None else receive[1],
        send_began=send,
        feedback_send_began=feedback_send,
        feedback_received=None if feedback is None else feedback[1],
    )


@pytest.mark.parametrize("receiver_first", [False, True])
def test_transfers_count_only_where_the_receiver_was_waiting(receiver_first: bool) -> None:
    offsets = {0: 0, 1: 5_000}
    links = LinkLatency(2)
    sender = (0, (moments(4, send=100), moments(5, send=300), moments(6, send=500)))
    receiver = (1, (moments(5, receive=(5_200, 5_350)), moments(6, receive=(5_900, 5_950))))
    for stage, told in (receiver, sender) if receiver_first else (sender, receiver):
        found = links.observed(stage, told, offsets.get)
    assert found.transfers == ((1, 50e-9),)  # plan 6's tensor waited for the stage; plan 4 is known at one end only
    assert links.observed(1, receiver[1], offsets.get).transfers == ()  # each plan once


def test_feedback_lasts_until_the_plan_that_takes_it() -> None:
    links = LinkLatency(3)
    offsets = {0: 0, 1: 0, 2: -40}
    links.observed(2, tuple(moments(seq, feedback_send=seq * 100 - 40) for seq in (1, 2, 3, 4)), offsets.get)
    first = (moments(4, feedback=(1, 110)), moments(5, feedback=(3, 350)), moments(6), moments(7, feedback=(3, 800)))
    assert links.observed(0, first, offsets.get).feedback == pytest.approx((150e-9, 50e-9))
    assert links.observed(0, first, offsets.get).feedback == ()


def test_nothing_is_measured_while_a_clock_is_unknown() -> None:
    links = LinkLatency(2)
    links.observed(0, (moments(1, send=10),), {0: 0}.get)
    assert links.observed(1, (moments(1, receive=(5, 20)),), {0: 0}.get).transfers == ()
    assert links.observed(1, (moments(1, receive=(5, 20)),), {0: 0, 1: 0}.get).transfers == ((1, 10e-9),)
