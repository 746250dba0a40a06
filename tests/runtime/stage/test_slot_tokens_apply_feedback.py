"""Feedback is taken once, in plan order, only as far as asked, and never for a slot's next holder; on a device too."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from oracles.simulated_accelerator import ImmediateAccelerator
from oracles.simulated_pipeline import GREEDY
from stageline_runtime.plan_bus.messages import BusProtocolError, PlanRow, SlotFill, StepPlan
from stageline_runtime.stage.step.slot_tokens import SlotTokens

Make = Callable[[int], SlotTokens]
pytestmark = pytest.mark.parametrize(
    "make", [SlotTokens, partial(SlotTokens, device=ImmediateAccelerator())], ids=["host", "device"]
)


def plan(seq: int, *slots: tuple[int, int], posted: bool = True, padded_tokens: int = 4) -> StepPlan:
    """A plan of decode rows, one for each (slot, generation)."""
    rows = tuple(PlanRow(slot, generation, 5, 1, (), need_sample=True) for slot, generation in slots)
    return StepPlan(seq, 0, (), rows, padded_tokens, -1, posted, dummy=False)


class Wire:
    """Feedback rows by plan; remembers in which order they are taken."""

    def __init__(self) -> None:
        self.rows: dict[int, list[list[int]]] = {}
        self.taken: list[int] = []

    def take(self, seq: int) -> Tensor:
        self.taken.append(seq)
        return torch.tensor(self.rows.pop(seq))


def filled(make: Make, *slots: tuple[int, int]) -> SlotTokens:
    tokens = make(4)
    for slot, generation in slots:
        tokens.fill(SlotFill(slot, generation, GREEDY))
    return tokens


def test_feedback_is_applied_in_order_and_only_as_far_as_asked(make: Make) -> None:
    tokens, wire = filled(make, (0, 1), (2, 1)), Wire()
    for seq, rows in enumerate(([[10], [20]], [[11]], [[21]])):
        wire.rows[seq] = rows
    tokens.expect(plan(0, (0, 1), (2, 1)))
    tokens.expect(plan(1, (0, 1)))
    tokens.expect(plan(2, (2, 1)))
    assert (tokens.due(-1), tokens.due(0)) == (False, True)
    tokens.apply_through(1, wire.take)
    assert wire.taken == [0, 1]
    assert not tokens.due(1)
    assert tokens.inputs(plan(3, (0, 1), (2, 1))).tolist() == [11, 20, 0, 0]
    tokens.apply_through(2, wire.take)
    tokens.apply_through(2, wire.take)
    assert wire.taken == [0, 1, 2]
    assert tokens.inputs(plan(4, (0, 1), (2, 1), padded_tokens=2)).tolist() == [11, 21]


def test_plans_without_feedback_are_not_waited_for(make: Make) -> None:
    tokens, wire = filled(make, (0, 1)), Wire()
    tokens.expect(plan(0, (0, 1), posted=False))
    tokens.apply_through(5, wire.take)
    assert wire.taken == []


def test_feedback_of_a_former_holder_is_taken_and_dropped(make: Make) -> None:
    tokens, wire = filled(make, (0, 1)), Wire()
    tokens.expect(plan(0, (0, 1)))
    tokens.expect(plan(1, (0, 1)))
    wire.rows = {0: [[10]], 1: [[11]]}
    tokens.apply_through(0, wire.take)
    tokens.fill(SlotFill(0, 2, GREEDY))
    before = tokens.inputs(plan(9, (0, 2), padded_tokens=1)).tolist()
    tokens.apply_through(1, wire.take)
    assert wire.taken == [0, 1]
    assert tokens.inputs(plan(9, (0, 2), padded_tokens=1)).tolist() == before == [10]


def test_prompt_chunks_come_from_the_plan(make: Make) -> None:
    tokens = filled(make, (0, 1), (1, 1))
    rows = (PlanRow(0, 1, 0, 3, (7, 8, 9), need_sample=False), PlanRow(1, 1, 4, 1, (6,), need_sample=True))
    mixed = StepPlan(0, 0, (), rows, 8, -1, feedback_posted=False, dummy=False)
    assert tokens.inputs(mixed).tolist() == [7, 8, 9, 6, 0, 0, 0, 0]


def test_feedback_of_another_number_of_rows_is_refused(make: Make) -> None:
    tokens, wire = filled(make, (0, 1), (2, 1)), Wire()
    wire.rows[7] = [[10]]
    tokens.expect(plan(7, (0, 1), (2, 1)))
    with pytest.raises(BusProtocolError, match="feedback of plan 7 has 1 rows, not 2"):
        tokens.apply_through(7, wire.take)
