"""How many sequences fit: machines shared by stages, machines of their own, and what is missing when none fits."""

from dataclasses import replace

import pytest

from stageline_runtime.engine.scheduling.cache_sizing import CacheSize, MemoryShortageError, size_cache
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.planning.memory import StageMemory, StageRoom

MIB = 1 << 20
TOKEN_OF_LAYER = 1024
"""Keys and values of one token in one layer: 1024 tokens of one layer take 1 MiB."""


def stage(
    index: int, host: str, available_mib: float, num_layers: int, weights_mib: int, step_mib: int = 0
) -> StageMemory:
    return StageMemory(
        stage=index,
        room=StageRoom(host=host, available_bytes=int(available_mib * MIB)),
        weight_bytes=weights_mib * MIB,
        step_bytes=step_mib * MIB,
        token_bytes=num_layers * TOKEN_OF_LAYER,
    )


def sized(*stages: StageMemory, max_num_seqs: int = 16) -> CacheSize:
    return size_cache(stages, max_num_seqs=max_num_seqs, max_model_len=1024)


def usable(mib: float) -> float:
    """Available memory of which `mib` are usable (a tenth stays free), with room for rounding."""
    return (mib + 0.01) / 0.9


DRAFT = stage(0, "a", 0, 1, 6, 3)
"""As one more layer."""


@pytest.mark.parametrize(
    ("stages", "num_blocks"),
    [
        # One stage of 8 layers: 128 KiB per block of 16 tokens, 8 MiB or 64 blocks per slot.
        ([stage(0, "a", usable(10 + 128), 8, 10)], 1024),
        ([stage(0, "a", usable(10 + 127), 8, 10)], 1016),
        ([stage(0, "a", usable(10 + 8), 8, 10)], 64),
        # Two stages of 4 layers, two cohorts: each block takes 64 KiB on either machine.
        ([stage(0, "a", usable(10 + 64), 4, 10), stage(1, "b", usable(10 + 64), 4, 10)], 1024),
        ([stage(0, "a", usable(10 + 64), 4, 10), stage(1, "b", usable(10 + 24), 4, 10)], 384),
        # The same on one machine: both stages' weights and caches share what the lower report says is left.
        ([stage(0, "a", usable(20 + 64), 4, 10), stage(1, "a", usable(20 + 64), 4, 10)], 512),
        ([stage(0, "a", usable(20 + 64), 4, 10), stage(1, "a", usable(20 + 16), 4, 10)], 128),
        # What the largest step takes is no cache's: 8 MiB on each, and on one machine both.
        ([stage(0, "a", usable(10 + 72), 4, 10, 8), stage(1, "b", usable(10 + 32), 4, 10, 8)], 384),
        ([stage(0, "a", usable(20 + 80), 4, 10, 8), stage(1, "a", usable(20 + 80), 4, 10, 8)], 512),
        # A draft model beside a stage: its weights, its cache's part of each block, and the larger of both steps.
        ([stage(0, "a", usable(10 + 6 + 3 + 9), 8, 10).with_draft(DRAFT)], 64),
        ([stage(0, "a", usable(10 + 6 + 8 + 9), 8, 10, 8).with_draft(DRAFT)], 64),
        # A machine with much memory gets no more than was asked for.
        ([stage(0, "a", 10**6, 4, 10), stage(1, "b", 10**6, 4, 10)], 1024),
    ],
)
def test_memory_decides_the_blocks_and_the_asked_for_sequences_the_slots(
    stages: list[StageMemory], num_blocks: int
) -> None:
    expected = CacheSize(num_cohorts=len(stages), num_slots=16, slot_tokens=1024, num_blocks=num_blocks)
    assert replace(sized(*stages), room_tokens=()) == expected
    assert expected.holds_all == (num_blocks == 1024)


def test_each_stage_has_the_room_that_its_memory_leaves_beside_the_weights() -> None:
    """128 blocks of 64 KiB are 8 MiB; stages of one machine share what both together leave."""
    apart = sized(stage(0, "a", usable(10 + 64), 4, 10), stage(1, "b", usable(10 + 24), 4, 10))
    assert apart.room_tokens == (1024 * BLOCK_TOKENS, 384 * BLOCK_TOKENS)
    shared = sized(stage(0, "a", usable(20 + 64), 4, 10), stage(1, "a", usable(20 + 16), 4, 10))
    assert shared.room_tokens == (128 * BLOCK_TOKENS, 128 * BLOCK_TOKENS)


def test_ranks_with_a_device_each_hold_as_much_more_together() -> None:
    """Two devices with room for 20 sequences each, of which 16 are asked for: eight lie on each."""

    def on_devices(mib: float, num_ranks: int) -> CacheSize:
        room = StageRoom(host="gpu", available_bytes=int((mib + 10.01) / 0.97 * MIB), is_device=True)
        stages = (replace(stage(0, "gpu", 0, 8, 10), room=room),)
        return size_cache(stages, max_num_seqs=16, max_model_len=1024, num_ranks=num_ranks)

    plenty = on_devices(160, 2)
    assert (plenty.num_ranks, plenty.num_blocks, plenty.holds_all) == (2, 8 * 64, True)
    assert plenty.room_tokens == (2 * 20 * 1024,)
    short = on_devices(24, 2)
    assert (short.num_blocks, short.num_tokens, short.holds_all) == (3 * 64, 6 * 1024, False)
    assert on_devices(24, 1).num_tokens == 3 * 1024


def test_ranks_on_a_host_beside_others_on_devices_take_the_blocks_of_all_from_its_memory() -> None:
    room = StageRoom(host="gpu", available_bytes=10**12, is_device=True)
    on_host = replace(stage(1, "b", usable(10 + 2 * 12), 4, 10), num_caches=2)
    stages = (replace(stage(0, "gpu", 0, 4, 10), room=room), on_host)
    size = size_cache(stages, max_num_seqs=16, max_model_len=1024, num_ranks=2)
    assert (size.num_blocks, size.num_tokens) == (3 * 64, 6 * 1024)


def test_there_are_as_many_sequences_as_were_asked_for() -> None:
    stages = [stage(index, str(index), 10**6, 2, 1) for index in range(3)]
    assert [sized(*stages, max_num_seqs=count).num_slots for count in (16, 3, 1)] == [16, 3, 1]


def test_one_sequence_of_the_longest_context_is_enough_however_many_stages_there_are() -> None:
    """80 layers of a 70B over eight devices of 40 GB, in bfloat16: room for 350,000 tokens, and 128k are asked for."""
    stages = tuple(
        StageMemory(
            stage=index,
            room=StageRoom(host=str(index), available_bytes=40_000_000_000, is_device=True),
            weight_bytes=18_000_000_000,
            step_bytes=1_000_000_000,
            token_bytes=2 * 10 * 8 * 128 * 2,
        )
        for index in range(8)
    )
    size = size_cache(stages, max_num_seqs=16, max_model_len=131_072)
    assert size.slot_tokens == 131_072
    assert 131_072 <= size.num_blocks * BLOCK_TOKENS < 8 * 131_072, "less than one for each cohort"


def test_a_shortage_names_the_stages_and_the_missing_memory() -> None:
    with pytest.raises(MemoryShortageError) as caught:
        sized(stage(0, "a", 1000, 4, 10), stage(1, "b", usable(10 + 2 + 3), 4, 10, 2))
    assert str(caught.value) == (
        "stage 1: 1 MiB of memory are missing: weights take 10 MiB, the largest step 2 MiB and the smallest cache (one "
        "sequence of maxModelLen 1024) 4 MiB, but 16 MiB are usable; lower spec.engine.maxModelLen or "
        "maxNumBatchedTokens, or use more stages"
    )


def test_weights_that_do_not_fit_are_a_shortage_too() -> None:
    with pytest.raises(MemoryShortageError, match=r"stage 0, 1: .* weights take 200 MiB"):
        sized(stage(0, "a", 50, 4, 100), stage(1, "a", 50, 4, 100))
