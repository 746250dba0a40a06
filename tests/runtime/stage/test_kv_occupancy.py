"""What slots use of a stage's KV cache follows from the plans it ran; what they share counts once."""

from stageline_runtime.plan_bus.messages import SlotBlocks, StepPlan
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.stage.telemetry.progress import KvOccupancy


def test_blocks_count_from_the_plan_that_gives_them_to_that_which_takes_them_away() -> None:
    occupancy = KvOccupancy()

    def blocks_after(*tables: SlotBlocks) -> float:
        occupancy.note(StepPlan(0, 0, (), (), 8, -1, False, False, tables=tables))
        return occupancy.tokens / BLOCK_TOKENS

    assert blocks_after(SlotBlocks(0, 0, (1, 2, 3), are_new=True)) == 3
    assert blocks_after(SlotBlocks(1, 0, (1, 2)), SlotBlocks(1, 2, (7,), are_new=True)) == 4
    assert blocks_after(SlotBlocks(0, 3, (4,), are_new=True)) == 5
    assert blocks_after(SlotBlocks(0, 0, ())) == 3
    assert blocks_after() == 3
    assert blocks_after(SlotBlocks(1, 1, ())) == 1
