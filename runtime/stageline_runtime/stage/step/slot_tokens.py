"""The first stage's memory of the newest token of each slot, which sampled tokens come back to as feedback.

Feedback is applied in plan order just before inputs are built. Invariant: a row of a stale generation is never applied,
however late it comes; every posted feedback is taken exactly once.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import ComputeDevice
from stageline_runtime.plan_bus.messages import BusProtocolError, SlotFill, StepPlan
from stageline_runtime.stage.step.host_tensors import int64s


class SlotTokens:
    """Newest token of every slot, on the stage's device: the host never reads a value, so it never waits for one.

    Which rows of a feedback are stale follows from generations, which the host knows; such a row's token is written to
    one more place, which no slot reads.
    """

    def __init__(self, num_slots: int, device: ComputeDevice = HOST) -> None:
        self._device = device
        self._generation = [0] * num_slots
        self._expected: deque[StepPlan] = deque()
        self._unread, self._padding = num_slots, num_slots + 1
        self._token = torch.zeros(num_slots + 2, dtype=torch.int64, device=device.device)

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

    def apply_through(self, feedback_through: int, take: Callable[[int], Tensor]) -> None:
        """Apply all feedback up to plan `feedback_through`; `take(seq)` gives its tokens `[num_rows, 1]`."""
        while self.due(feedback_through):
            plan = self._expected.popleft()
            tokens = take(plan.seq)
            places = [
                row.slot if self._generation[row.slot] == row.generation else self._unread for row in plan.sampled_rows
            ]
            if len(tokens) != len(places):
                raise BusProtocolError(f"feedback of plan {plan.seq} has {len(tokens)} rows, not {len(places)}")
            self._token.put_(self._device.place(int64s(places)), tokens)

    def inputs(self, plan: StepPlan) -> Tensor:
        """Token ids `[padded_tokens]` of a plan: prompt chunks and drafts from the plan, decode rows from feedback."""
        places: list[int] = []
        given: list[int] = []
        first = len(self._token)
        for row in plan.rows:
            if row.token_ids:
                places.extend(range(first + len(given), first + len(given) + len(row.token_ids)))
                given.extend(row.token_ids)
            else:
                places.append(row.slot)
        places.extend([self._padding] * (plan.padded_tokens - len(places)))
        placed = self._device.place(int64s(places + given))
        if not given:
            return self._token.index_select(0, placed)
        return torch.cat((self._token, placed[len(places) :])).index_select(0, placed[: len(places)])
