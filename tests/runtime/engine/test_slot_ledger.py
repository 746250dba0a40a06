"""Slots are given out once, with a new generation each time; only cached beginnings have several holders."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import SlotBlocks
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def compute(ledger: SlotLedger, slot: int, content: tuple[int, ...]) -> None:
    """Let the ledger know that plans have filled the slot's blocks with `content`."""
    full = range(ledger.num_cached(slot) * BLOCK_TOKENS, len(content) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    ledger.note_full(slot, [content[start : start + BLOCK_TOKENS] for start in full])


def test_the_lowest_free_slot_goes_first_with_a_new_generation() -> None:
    ledger = SlotLedger(num_cohorts=2, num_slots=3, slot_tokens=10)
    assert [ledger.take(tokens(4)) for _ in range(3)] == [(0, 1, 0), (1, 1, 0), (2, 1, 0)]
    assert not ledger.has_free_slot(0)
    ledger.give_back(1)
    assert ledger.take(tokens(4)) == (1, 2, 0)


def test_blocks_run_out_before_slots_do() -> None:
    ledger = SlotLedger(1, 4, 64, num_blocks=6)
    assert ledger.take(tokens(40)) == (0, 1, 0)
    assert ledger.take(tokens(33)) == (1, 1, 0)
    assert (ledger.held_blocks, ledger.available_blocks(0)) == (6, 0)
    assert ledger.grow(0, 48)
    assert not ledger.grow(0, 49)
    ledger.give_back(1)
    assert ledger.grow(0, 49)
    assert len(ledger.blocks(0)) == 4


def test_a_sequence_lies_in_neighbouring_blocks_while_there_is_room() -> None:
    ledger = SlotLedger(1, 4, 64)
    for _ in range(4):
        ledger.take(tokens(20))
    for end in (33, 49, 64):
        assert all(ledger.grow(slot, end) for slot in range(4))
    assert [ledger.blocks(slot) for slot in range(4)] == [tuple(range(start, start + 4)) for start in (0, 4, 8, 12)]


def test_requests_that_begin_alike_share_blocks_and_others_do_not() -> None:
    ledger = SlotLedger(1, 4, 128, prefix_cache=True)
    first, *_ = ledger.take(tokens(96))
    compute(ledger, first, tokens(96))
    second, _, cached = ledger.take((*tokens(48), 999, *tokens(20)))
    assert cached == 48
    assert ledger.blocks(second)[:3] == ledger.blocks(first)[:3]
    assert not set(ledger.blocks(second)[3:]) & set(ledger.blocks(first))
    assert ledger.held_blocks == 6 + 2
    third, _, cached = ledger.take(tokens(48))
    assert cached == 32, "the last token is computed always"
    ledger.give_back(first)
    assert ledger.cached_blocks == 3, "what nobody shares stays of use"
    ledger.give_back(second)
    ledger.give_back(third)
    assert ledger.take(tokens(97))[2] == 96


def test_what_two_computed_alike_is_kept_once() -> None:
    ledger = SlotLedger(1, 2, 64, prefix_cache=True)
    for slot in (0, 1):
        assert ledger.take(tokens(40)) == (slot, 1, 0)
    ledger.take_changes()
    own = ledger.blocks(1)
    for slot in (0, 1):
        compute(ledger, slot, tokens(40))
    assert ledger.blocks(1) == (*ledger.blocks(0)[:2], own[2])
    assert ledger.held_blocks == 4
    assert ledger.take_changes() == (SlotBlocks(1, 0, ledger.blocks(1)),)


def test_a_waiting_request_shares_what_was_computed_since_it_got_its_slot() -> None:
    ledger = SlotLedger(1, 2, 64, prefix_cache=True)
    for _ in range(2):
        ledger.take(tokens(40))
    compute(ledger, 0, tokens(40))
    assert ledger.share_more(1, tokens(40)) == 32
    assert ledger.blocks(1)[:2] == ledger.blocks(0)[:2]
    assert ledger.held_blocks == 4


def test_content_is_of_use_under_its_own_salt_alone() -> None:
    ledger = SlotLedger(1, 3, 64, prefix_cache=True)
    for salt in ("", "ours"):
        slot, *_ = ledger.take(tokens(48), salt)
        compute(ledger, slot, tokens(48))
        ledger.give_back(slot)
    assert [ledger.take((*tokens(48), 9), salt)[2] for salt in ("theirs", "ours", "")] == [0, 48, 48]


def test_the_longest_unused_content_goes_first_and_from_its_end() -> None:
    ledger = SlotLedger(1, 4, 64, num_blocks=8, prefix_cache=True)
    for first in (0, 100):
        slot, *_ = ledger.take(tokens(48, first))
        compute(ledger, slot, tokens(48, first))
    ledger.give_back(1)
    ledger.give_back(0)
    assert ledger.cached_blocks == 6
    ledger.take(tokens(64, 200))
    assert (ledger.held_blocks, ledger.cached_blocks) == (4, 4)
    slot, _, cached = ledger.take(tokens(60, 100))
    assert cached == 16, "its first block is still there"
    assert (ledger.held_blocks, ledger.cached_blocks) == (8, 0)


@given(
    num_slots=st.integers(1, 9),
    blocks=st.integers(3, 30),
    ranks=st.integers(1, 3),
    caching=st.booleans(),
    steps=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 48), st.integers(0, 3)), max_size=60),
)
def test_a_slot_is_free_or_held_and_blocks_never_exceed_their_number(
    num_slots: int, blocks: int, ranks: int, caching: bool, steps: list[tuple[int, int, int]]
) -> None:
    """Each step computes, ends or grows a request, or begins another. The tables that stages are told are the ledger's;
    what is told as new is in no other table, and what was computed is never new."""
    num_slots = max(num_slots, ranks)
    ledger = SlotLedger(1, num_slots, 48, num_blocks=blocks, prefix_cache=caching, num_ranks=ranks)
    held: dict[int, tuple[int, ...]] = {}
    told: dict[int, list[int]] = {slot: [] for slot in range(num_slots)}
    newest = Counter[int]()
    for choice, count, what in steps:
        if choice < len(held):
            slot = sorted(held)[choice]
            match what:
                case 0:
                    del held[slot]
                    ledger.give_back(slot)
                case 1 if caching:
                    compute(ledger, slot, held[slot])
                case 2:
                    cached = ledger.num_cached(slot)
                    assert ledger.share_more(slot, held[slot]) >= cached * BLOCK_TOKENS
                case _:
                    missing, room = blocks_of(count) - len(ledger.blocks(slot)), ledger.available_blocks(slot % ranks)
                    assert ledger.grow(slot, count) == (missing <= room)
                    held[slot] = tokens(max(count, len(held[slot]))) if missing <= room else held[slot]
        elif fitting := [
            rank
            for rank in range(ranks)
            if ledger.has_free_slot(rank) and ledger.spare_blocks(count, tokens(count), "", rank) >= 0
        ]:
            slot, generation, known = ledger.take(tokens(count), ranks=fitting)
            newest[slot] += 1
            assert slot not in held
            assert (slot % ranks in fitting, generation) == (True, newest[slot])
            assert known < count
            held[slot] = tokens(count)
        for change in ledger.take_changes():
            told[change.slot][change.start :] = change.blocks
            of_rank = [block for slot in range(change.slot % ranks, num_slots, ranks) for block in told[slot]]
            assert not change.are_new or all(of_rank.count(block) == 1 for block in change.blocks), (change, told)
        assert {slot: tuple(told[slot]) for slot in held} == {slot: ledger.blocks(slot) for slot in held}
        assert not any(told[slot] for slot in told if slot not in held)
        of_ranks = [{block for slot in held if slot % ranks == rank for block in told[slot]} for rank in range(ranks)]
        assert ledger.held_blocks == sum(map(len, of_ranks))
        assert [ledger.available_blocks(rank) for rank in range(ranks)] == [
            ledger.num_blocks // ranks - len(used) for used in of_ranks
        ]
        assert ledger.held_blocks + ledger.cached_blocks <= ledger.num_blocks
        assert caching or ledger.cached_blocks == 0


def test_a_named_beginning_is_held_for_as_long_as_its_blocks_are() -> None:
    ledger = SlotLedger(1, 4, 64, num_blocks=8, prefix_cache=True)
    slot, *_ = ledger.take(tokens(60), "", (("short", 15), ("half", 31), ("most", 40), ("all", 60)))
    assert ledger.named_prefixes() == set(), "nothing is computed yet"
    compute(ledger, slot, tokens(32))
    assert ledger.named_prefixes() == {"half", "most"}, "to their last whole block; the short one has none"
    compute(ledger, slot, tokens(48))
    assert ledger.named_prefixes() == {"half", "most", "all"}
    ledger.give_back(slot)
    assert ledger.named_prefixes() == {"half", "most", "all"}, "what is cached stays of use"
    ledger.take(tokens(64, 100))
    ledger.take(tokens(33, 200))
    assert ledger.named_prefixes() == {"half"}, "its last two blocks went to others"


def test_who_shares_a_beginning_gives_it_another_name() -> None:
    ledger = SlotLedger(1, 2, 64, prefix_cache=True)
    ledger.take(tokens(48), "", (("old", 32),))
    compute(ledger, 0, tokens(48))
    ledger.take(tokens(48), "", (("new", 32),))
    assert ledger.named_prefixes() == {"old", "new"}


def test_without_a_prefix_cache_no_name_is_held() -> None:
    ledger = SlotLedger(1, 1, 64)
    ledger.take(tokens(48), "", (("old", 32),))
    assert ledger.named_prefixes() == set()


def test_what_ends_with_several_requests_is_counted_once_they_all_are_given_back() -> None:
    """Blocks that only they share are of use to nobody then; those that another shares stay."""
    ledger = SlotLedger(1, 4, 128, num_blocks=8, prefix_cache=True)
    first, *_ = ledger.take(tokens(80))
    compute(ledger, first, tokens(80))
    second, *_ = ledger.take((*tokens(64), 999))
    assert (ledger.held_blocks, ledger.available_blocks(0)) == (6, 2)
    other = tokens(128, 500)
    spare = [ledger.spare_blocks(128, other, "", 0, without) for without in ((), (first,), (second,), (first, second))]
    assert spare == [2 - 8, 2 + 1 - 8, 2 + 1 - 8, 0]
    assert ledger.spare_blocks(65, (*tokens(64), 7), "", 0) == 2 - 1, "it shares four with both"
    assert ledger.spare_blocks(65, (*tokens(64), 7), "", 0, (first, second)) == 8 - 5, "and has them alone then"


def test_a_block_that_many_prompts_end_in_keeps_the_newest_names() -> None:
    ledger = SlotLedger(1, 1, 64, prefix_cache=True)
    for number in range(20):
        ledger.take((*tokens(20), number), "", ((f"name {number}", 21),))
        compute(ledger, 0, tokens(16))
        ledger.give_back(0)
    assert ledger.named_prefixes() == {f"name {number}" for number in range(12, 20)}


def test_a_warm_cache_gives_neighbours_too() -> None:
    """What has to go for a sequence goes first, so that its blocks are a run again."""
    ledger = SlotLedger(1, 1, 128, prefix_cache=True)
    ledger.take(tokens(128))
    compute(ledger, 0, tokens(128))
    ledger.give_back(0)
    ledger.take(tokens(96, 500))
    assert ledger.blocks(0) == (2, 3, 4, 5, 6, 7)
