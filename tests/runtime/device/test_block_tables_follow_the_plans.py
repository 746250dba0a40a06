"""Slots share blocks out fairly: none is two slots' at once, all that is given back comes round again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.models.device.step_rows import BlockTables
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of

NUM_SLOTS, SLOT_TOKENS, NUM_BLOCKS = 4, 100, 12
steps = st.lists(
    st.tuples(
        st.sampled_from(("write", "trim", "copy")),
        st.integers(0, NUM_SLOTS - 1),
        st.integers(0, NUM_SLOTS - 1),
        st.integers(0, SLOT_TOKENS),
    ),
    max_size=40,
)


@given(steps)
def test_no_block_has_two_owners_and_none_gets_lost(steps: list[tuple[str, int, int, int]]) -> None:
    tables = BlockTables(num_slots=NUM_SLOTS, slot_tokens=SLOT_TOKENS, num_blocks=NUM_BLOCKS)
    seen_by_device: dict[int, int] = {}
    for kind, slot, other, tokens in steps:
        held = blocks_of(tokens)
        match kind:
            case "write":
                if held - len(tables.of(slot)) <= tables.num_free:
                    tables.reserve(slot, tokens)
            case "trim":
                tables.trim(slot, tokens)
            case _:
                if slot != other and held <= len(tables.of(slot)):
                    tables.trim(other, 0)
                    if held <= tables.num_free:
                        pairs = tables.copy(slot, other, tokens)
                        assert [source for source, _ in pairs] == list(tables.of(slot))[:held]
                        assert [target for _, target in pairs] == list(tables.of(other))
        seen_by_device |= dict(tables.take_changes())
        owned = [block for each in range(NUM_SLOTS) for block in tables.of(each)]
        assert len(owned) == len(set(owned)) == NUM_BLOCKS - tables.num_free
        for each in range(NUM_SLOTS):
            first = each * tables.blocks_per_slot
            entries = tuple(seen_by_device[first + index] for index in range(len(tables.of(each))))
            assert entries == tables.of(each)


def test_running_out_names_the_slot_and_the_position() -> None:
    tables = BlockTables(num_slots=2, slot_tokens=SLOT_TOKENS, num_blocks=2)
    tables.reserve(0, BLOCK_TOKENS + 1)
    with pytest.raises(ValueError, match="slot 1 needs a block for position 0, but none is left"):
        tables.reserve(1, 1)
