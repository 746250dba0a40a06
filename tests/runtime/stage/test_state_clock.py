"""The clock is always in exactly one state, so the states' seconds sum to wall time at every moment."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.stage.telemetry.state_clock import IDLE, BusyKind, State, StateClock, WaitReason

STATES: list[State] = [*BusyKind, *WaitReason, IDLE]


class FakeTime:
    def __init__(self) -> None:
        self.nanoseconds = 1_000

    def __call__(self) -> int:
        return self.nanoseconds


@given(st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 10**12)), max_size=40), st.integers(0, 10**12))
def test_states_sum_to_wall(changes: list[tuple[State, int]], first_nanoseconds: int) -> None:
    now = FakeTime()
    clock = StateClock(now)
    expected: dict[State, int] = {IDLE: first_nanoseconds}
    now.nanoseconds += first_nanoseconds
    for state, nanoseconds in changes:
        clock.enter(state)
        assert clock.state == state
        now.nanoseconds += nanoseconds
        expected[state] = expected.get(state, 0) + nanoseconds
        spent, wall = clock.reading()
        assert {key: round(value * 1e9) for key, value in spent.items()} == {
            key: value for key, value in expected.items() if key in spent
        }
        assert round(sum(spent.values()) * 1e9) == round(wall * 1e9) == sum(expected.values())


def test_a_reading_changes_nothing() -> None:
    now = FakeTime()
    clock = StateClock(now)
    clock.enter(WaitReason.RECV)
    now.nanoseconds += 2_000_000_000
    assert clock.reading() == clock.reading() == ({IDLE: 0.0, WaitReason.RECV: 2.0}, 2.0)


def test_readings_during_changes_are_whole() -> None:
    """A scrape in the middle of a change sees old or new; the sum is never off."""
    clock = StateClock()
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            for state in STATES:
                clock.enter(state)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            spent, wall = clock.reading()
            assert abs(sum(spent.values()) - wall) < 1e-6
    finally:
        done.set()
        thread.join()
