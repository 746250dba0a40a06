"""The first stage's token memory beside a second account of what feedback may do to it, compared after each use.

The tokens that come out can't show a stale row that was applied and then overwritten in time, so the memory itself is
looked at: after each application it holds exactly what the rows of living generations, in plan order, put there.
"""

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from stageline_runtime.accelerator.protocol import ComputeDevice
from stageline_runtime.plan_bus.messages import PlanRow, SlotFill, StepPlan
from stageline_runtime.stage.step.slot_tokens import SlotTokens


class WatchedSlotTokens(SlotTokens):
    """Takes the place of the runner's `SlotTokens`."""

    def __init__(self, num_slots: int, device: ComputeDevice, *, seen: Counter[str]) -> None:
        """`seen` counts the stale rows that came."""
        super().__init__(num_slots, device)
        self._seen = seen
        self._living = [0] * num_slots
        self._right = [0] * num_slots
        self._to_come: dict[int, StepPlan] = {}

    def fill(self, fill: SlotFill) -> None:
        super().fill(fill)
        self._living[fill.slot] = fill.generation

    def expect(self, plan: StepPlan) -> None:
        super().expect(plan)
        if plan.feedback_posted:
            self._to_come[plan.seq] = plan

    def apply_through(self, feedback_through: int, take: Callable[[int], Tensor]) -> None:
        taken: list[tuple[int, list[int]]] = []

        def watched_take(seq: int) -> Tensor:
            assert seq <= feedback_through, (
                f"feedback of plan {seq} is waited for, but only {feedback_through} is named"
            )
            rows = take(seq)
            taken.append((seq, rows.flatten().tolist()))
            return rows

        super().apply_through(feedback_through, watched_take)
        due = sorted(seq for seq in self._to_come if seq <= feedback_through)
        assert [seq for seq, _ in taken] == due, f"feedback taken of {taken}, due was that of {due}"
        for seq, tokens in taken:
            self._account(self._to_come.pop(seq), tokens)
        assert self._held() == self._right, f"through {feedback_through}: {self._held()} is not {self._right}"

    def _account(self, plan: StepPlan, tokens: list[int]) -> None:
        for row, token in zip(plan.sampled_rows, tokens, strict=True):
            if self._living[row.slot] == row.generation:
                self._right[row.slot] = token
            else:
                self._seen["stale feedback"] += 1

    def _held(self) -> list[int]:
        """What each slot's next decode row would take as its input."""
        rows = tuple(PlanRow(slot, 0, 0, 1, (), need_sample=False) for slot in range(len(self._living)))
        probe = StepPlan(-1, 0, (), rows, len(rows), -1, feedback_posted=False, dummy=False)
        return [int(token) for token in self.inputs(probe).tolist()]
