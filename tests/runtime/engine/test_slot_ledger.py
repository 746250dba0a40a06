"""Slots are given out once, with a new generation each time; blocks are never promised twice, and losses are told."""

from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import SlotTrim
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def hold(ledger: SlotLedger, slot: int, content: tuple[int, ...], salt: str = "") -> None:
    """Let the index know whole blocks of `content` in `slot`."""
    assert ledger.prefixes is not None
    for start in range(0, len(content) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        ledger.prefixes.extend(slot, content[start : start + BLOCK_TOKENS], salt)


def test_the_lowest_empty_slot_of_the_cohort_goes_first_then_any_other() -> None:
    ledger = SlotLedger(num_cohorts=2, slots_per_cohort=2, slot_tokens=10)
    assert [ledger.take(cohort, tokens(4)) for cohort in (0, 1, 1, 1)] == [(0, 1, 0), (2, 1, 0), (3, 1, 0), (1, 1, 0)]
    assert not ledger.has_free_slot(0)
    ledger.give_back(2)
    assert ledger.take(0, tokens(4)) == (2, 2, 0)
    assert ledger.take_trims() == (), "there is memory for all slots, so nothing has to be given up"


def test_blocks_run_out_before_slots_do() -> None:
    ledger = SlotLedger(1, 4, 64, num_blocks=6)
    assert ledger.take(0, tokens(40)) == (0, 1, 0)
    assert ledger.take(0, tokens(33)) == (1, 1, 0)
    assert (ledger.held_blocks, ledger.available_blocks(0)) == (6, 0)
    assert ledger.grow(0, 48)
    assert not ledger.grow(0, 49)
    ledger.give_back(1)
    assert ledger.grow(0, 49)
    assert ledger.held_by(0) == 4


def test_content_is_kept_in_place_where_it_is_half_of_what_the_slot_holds() -> None:
    ledger = SlotLedger(1, 3, 128, prefix_cache=True)
    slot, _, kept = ledger.take(0, tokens(96))
    assert (slot, kept) == (0, 0)
    hold(ledger, slot, tokens(96))
    ledger.give_back(slot)
    assert ledger.cached_blocks == 6
    assert ledger.take(0, (*tokens(32), 999, *tokens(40))) == (1, 1, 0), "four blocks would be lost for two"
    assert ledger.take(0, (*tokens(48), 999)) == (0, 2, 48)
    ledger.give_back(0)
    assert ledger.take(0, tokens(48)) == (0, 3, 32), "the last token is computed always"


def test_content_is_of_use_under_its_own_salt_alone() -> None:
    ledger = SlotLedger(1, 3, 64, prefix_cache=True)
    for salt in ("", "ours"):
        slot, *_ = ledger.take(0, tokens(48), salt)
        hold(ledger, slot, tokens(48), salt)
    ledger.give_back(0)
    ledger.give_back(1)
    assert ledger.take(0, (*tokens(48), 9), "theirs") == (2, 1, 0), "an empty slot, though two hold these tokens"
    assert ledger.take(0, (*tokens(48), 9), "ours") == (1, 2, 48)
    assert ledger.take(0, (*tokens(48), 9), "theirs") == (0, 2, 0), "the last slot, whose content goes"
    assert ledger.prefixes is not None
    assert [ledger.prefixes.match((*tokens(48), 9), salt)[0] for salt in ("", "ours", "theirs")] == [0, 3, 0]


def test_the_longest_unused_content_is_given_up_first_and_from_its_end() -> None:
    ledger = SlotLedger(1, 4, 64, num_blocks=8, prefix_cache=True)
    for first in (0, 100):
        slot, *_ = ledger.take(0, tokens(48, first))
        hold(ledger, slot, tokens(48, first))
    ledger.give_back(1)
    ledger.give_back(0)
    ledger.take_trims()
    assert ledger.cached_blocks == 6
    assert ledger.take(0, tokens(64, 200))[0] == 2
    assert ledger.take_trims() == (SlotTrim(1, 16), SlotTrim(2, 0))
    assert (ledger.held_blocks, ledger.cached_blocks) == (4, 4)
    assert ledger.take(0, tokens(60, 100)) == (1, 2, 16), "its first block is still there"
    assert (ledger.held_blocks, ledger.cached_blocks) == (8, 0)
    assert ledger.take_trims() == (SlotTrim(0, 0), SlotTrim(1, 16))


@given(
    num_cohorts=st.integers(1, 3),
    slots=st.integers(1, 3),
    blocks=st.integers(3, 30),
    pools=st.integers(1, 3),
    caching=st.booleans(),
    steps=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 48), st.booleans()), max_size=60),
)
def test_a_slot_is_free_or_held_and_blocks_never_exceed_their_number(
    num_cohorts: int, slots: int, blocks: int, pools: int, caching: bool, steps: list[tuple[int, int, bool]]
) -> None:
    """Each step gives a held slot back, lets it grow, or takes another one. Each pool's slots take its own blocks."""
    ledger = SlotLedger(num_cohorts, slots, 48, num_blocks=blocks, prefix_cache=caching, num_pools=pools)
    held: dict[int, int] = {}
    newest: dict[int, int] = {}
    for choice, count, grow in steps:
        if choice < len(held):
            slot = sorted(held)[choice]
            if grow:
                before, room = blocks_of(held[slot]), ledger.available_blocks(slot % pools)
                assert ledger.grow(slot, count) == (blocks_of(count) - before <= room)
                held[slot] = max(held[slot], count) if blocks_of(count) - before <= room else held[slot]
            else:
                if caching:
                    hold(ledger, slot, tokens(held[slot])[ledger.prefixes.num_blocks(slot) * 16 :])  # type: ignore[union-attr]
                del held[slot]
                ledger.give_back(slot)
        elif fitting := [
            pool
            for pool in range(pools)
            if ledger.has_free_slot(pool) and blocks_of(count) <= ledger.available_blocks(pool)
        ]:
            slot, generation, kept = ledger.take(choice % num_cohorts, tokens(count), pools=fitting)
            assert slot not in held
            assert slot % pools in fitting
            assert generation == newest.get(slot, 0) + 1
            assert kept < count
            held[slot], newest[slot] = count, generation
        assert ledger.held_slots == len(held)
        assert ledger.held_blocks == sum(map(blocks_of, held.values()))
        for pool in range(pools):
            of_pool = sum(blocks_of(held[slot]) for slot in held if slot % pools == pool)
            assert of_pool <= blocks
            assert ledger.available_blocks(pool) <= blocks - of_pool
        assert ledger.held_blocks + ledger.cached_blocks <= ledger.num_blocks
        assert caching or ledger.cached_blocks == 0


def test_a_named_beginning_is_held_for_as_long_as_its_blocks_are() -> None:
    ledger = SlotLedger(1, 4, 64, num_blocks=8, prefix_cache=True)
    slot, *_ = ledger.take(0, tokens(60), "", (("short", 15), ("half", 31), ("most", 40), ("all", 60)))
    assert ledger.named_prefixes() == set(), "nothing is computed yet"
    hold(ledger, slot, tokens(32))
    assert ledger.named_prefixes() == {"half", "most"}, "to their last whole block; the short one has none"
    hold(ledger, slot, tokens(16, 32))
    assert ledger.named_prefixes() == {"half", "most", "all"}
    ledger.give_back(slot)
    assert ledger.named_prefixes() == {"half", "most", "all"}, "a free slot keeps what it has"
    ledger.take(0, tokens(64, 100))
    ledger.take(0, tokens(33, 200))
    assert ledger.named_prefixes() == {"half"}, "its last two blocks went to others"


def test_names_go_with_the_next_holder_of_the_slot() -> None:
    ledger = SlotLedger(1, 1, 64, prefix_cache=True)
    ledger.take(0, tokens(48), "", (("old", 32),))
    hold(ledger, 0, tokens(48))
    ledger.give_back(0)
    ledger.take(0, tokens(48, 500), "", (("new", 32),))
    assert ledger.named_prefixes() == set()
    hold(ledger, 0, tokens(48, 500))
    assert ledger.named_prefixes() == {"new"}


def test_without_a_prefix_cache_no_name_is_held() -> None:
    ledger = SlotLedger(1, 1, 64)
    ledger.take(0, tokens(48), "", (("old", 32),))
    assert ledger.named_prefixes() == set()
