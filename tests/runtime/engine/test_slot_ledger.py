"""Slots are given out once, lowest first, in the lightest cohort, with a new generation each time."""

from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.engine.slots import SlotLedger


def test_lowest_slot_of_the_lightest_cohort() -> None:
    ledger = SlotLedger(num_cohorts=2, slots_per_cohort=2, slot_tokens=10)
    taken = []
    while (cohort := ledger.lightest_cohort()) is not None:
        taken.append(ledger.take(cohort, 10))
    assert taken == [(0, 1), (2, 1), (1, 1), (3, 1)]
    ledger.give_back(2)
    assert ledger.lightest_cohort() == 1
    assert ledger.take(1, 4) == (2, 2)
    assert (ledger.reserved_tokens, ledger.capacity_tokens) == (34, 40)


@given(num_cohorts=st.integers(1, 3), slots=st.integers(1, 3), choices=st.lists(st.integers(0, 8), max_size=60))
def test_a_slot_is_free_or_held_never_both(num_cohorts: int, slots: int, choices: list[int]) -> None:
    """`choices` gives back the slot of that index when one is held, and takes one otherwise."""
    ledger = SlotLedger(num_cohorts, slots, 10)
    held: dict[int, int] = {}
    newest: dict[int, int] = {}
    for choice in choices:
        cohort = ledger.lightest_cohort()
        if choice < len(held):
            slot = sorted(held)[choice]
            del held[slot]
            ledger.give_back(slot)
        elif cohort is not None:
            slot, generation = ledger.take(cohort, choice)
            assert slot not in held
            assert slot // slots == cohort
            assert generation == newest.get(slot, 0) + 1
            held[slot], newest[slot] = choice, generation
        else:
            assert len(held) == num_cohorts * slots
        assert ledger.held_slots == len(held)
        assert ledger.reserved_tokens == sum(held.values())
        assert [ledger.held_in(each) for each in range(num_cohorts)] == [
            sum(slot // slots == each for slot in held) for each in range(num_cohorts)
        ]
