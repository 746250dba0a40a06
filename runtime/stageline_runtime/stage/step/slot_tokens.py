"""The first stage's memory of sampled tokens: feedback is applied here, in plan order, just before inputs are built.

Invariant: a row of a stale generation is never applied, however late it comes; every posted feedback is taken exactly
once, in the order of its plan.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import SlotFill, StepPlan


class ExpectedFeedback:
    """Which request holds each slot, and which plans' feedback is still to come; knows no token."""

    def __init__(self, num_slots: int) -> None:
        self._generation = [0] * num_slots
        self._expected: deque[StepPlan] = deque()

    def fill(self, fill: SlotFill) -> None:
        """A request takes a slot; what its former holder still has coming is stale from now on."""
        self._generation[fill.slot] = fill.generation

    def expect(self, plan: StepPlan) -> None:
        """Plan `plan` will be followed by feedback; called in plan order."""
        if plan.feedback_posted:
            self._expected.append(plan)

    def due(self, feedback_through: int) -> bool:
        """Whether feedback up to `feedback_through` is still to be applied."""
        return bool(self._expected) and self._expected[0].seq <= feedback_through

    def take_due(self, feedback_through: int) -> Iterator[StepPlan]:
        """The plans whose feedback is to be applied now, in order; each is given once."""
        while self.due(feedback_through):
            yield self._expected.popleft()

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether the slot is still held by the request that had this generation."""
        return self._generation[slot] == generation


class SlotTokens(ExpectedFeedback):
    """Newest token of every slot, and the feedback still to come."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._token = torch.zeros(num_slots, dtype=torch.int64)

    def apply_through(self, feedback_through: int, take: Callable[[int], Tensor]) -> None:
        """Apply all feedback up to plan `feedback_through`; `take(seq)` gives its rows `[num_rows, 3]`."""
        for plan in self.take_due(feedback_through):
            rows = take(plan.seq).tolist()
            for planned, (generation, _count, token) in zip(plan.sampled_rows, rows, strict=True):
                assert generation == planned.generation, f"plan {plan.seq}: feedback of another row"
                if self.is_current(planned.slot, generation):
                    self._token[planned.slot] = token

    def inputs(self, plan: StepPlan) -> Tensor:
        """Token ids `[padded_tokens]` of a plan: prompt chunks from the plan, decode rows from feedback."""
        ids: list[int] = []
        for row in plan.rows:
            ids.extend(row.token_ids or (int(self._token[row.slot]),))
        ids.extend([0] * (plan.padded_tokens - len(ids)))
        return torch.tensor(ids, dtype=torch.int64)
