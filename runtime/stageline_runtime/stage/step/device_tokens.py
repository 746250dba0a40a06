"""The first stage's memory of sampled tokens on a device: feedback goes from the transport to the inputs unseen.

Which rows of a feedback are stale follows from generations alone, which the host knows; a stale row's token is written
to a place that no slot reads.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.plan_bus.messages import StepPlan
from stageline_runtime.stage.step.slot_tokens import ExpectedFeedback


class DeviceSlotTokens(ExpectedFeedback):
    """Newest token of every slot on the device, and the feedback still to come. As `SlotTokens`."""

    def __init__(self, num_slots: int, accelerator: Accelerator) -> None:
        super().__init__(num_slots)
        self._accelerator = accelerator
        self._nowhere = num_slots
        self._token = torch.zeros(num_slots + 1, dtype=torch.int64, device=accelerator.device)

    def apply_through(self, feedback_through: int, take: Callable[[int], Tensor]) -> None:
        """Apply all feedback up to plan `feedback_through`; `take(seq)` gives its rows `[num_rows, 3]`."""
        for plan in self.take_due(feedback_through):
            rows = take(plan.seq)
            places = [
                row.slot if self.is_current(row.slot, row.generation) else self._nowhere for row in plan.sampled_rows
            ]
            self._token[self._accelerator.place(torch.tensor(places, dtype=torch.int64))] = rows[:, 2]

    def inputs(self, plan: StepPlan) -> Tensor:
        """Token ids `[padded_tokens]` of a plan: prompt chunks from the plan, decode rows from feedback."""
        ids: list[int] = []
        for row in plan.rows:
            ids.extend(row.token_ids or (-1 - row.slot,))
        ids.extend([0] * (plan.padded_tokens - len(ids)))
        given = self._accelerator.place(torch.tensor(ids, dtype=torch.int64))
        return torch.where(given < 0, self._token[(-1 - given).clamp(min=0)], given)
