"""What lies in a stage's KV cache follows from the plans it ran."""

from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotFill, SlotTrim, StepPlan
from stageline_runtime.stage.telemetry.progress import KvOccupancy

GREEDY = RequestSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0)


def plan(seq: int, fills: tuple[SlotFill, ...], rows: tuple[PlanRow, ...]) -> StepPlan:
    return StepPlan(seq, 0, fills, rows, 8, -1, False, False)


def test_rows_add_what_they_write_and_a_fill_empties_its_slot() -> None:
    occupancy = KvOccupancy()
    prompt = PlanRow(0, 1, 0, 5, (1, 2, 3, 4, 5), True)
    occupancy.note(plan(0, (SlotFill(0, 1, GREEDY),), (prompt,)))
    assert occupancy.tokens == 5
    other = PlanRow(3, 1, 0, 2, (7, 8), True)
    occupancy.note(plan(1, (SlotFill(3, 1, GREEDY),), (PlanRow(0, 1, 5, 1, (), True), other)))
    assert occupancy.tokens == 8
    occupancy.note(plan(2, (SlotFill(0, 2, GREEDY),), (PlanRow(0, 2, 0, 1, (9,), True),)))
    assert occupancy.tokens == 3
    occupancy.note(plan(3, (), ()))
    assert occupancy.tokens == 3


def test_a_fill_may_begin_with_tokens_and_a_trim_leaves_a_rest() -> None:
    occupancy = KvOccupancy()
    row = PlanRow(0, 1, 32, 5, (1, 2, 3, 4, 5), True)
    occupancy.note(plan(0, (SlotFill(0, 1, GREEDY, cached_tokens=32, copy_from=2),), (row,)))
    assert occupancy.tokens == 37
    trims = (SlotTrim(0, 16), SlotTrim(1, 48))
    occupancy.note(StepPlan(1, 0, (), (), 8, -1, False, False, trims=trims))
    assert occupancy.tokens == 16
