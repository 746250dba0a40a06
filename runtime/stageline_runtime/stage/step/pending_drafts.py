"""What a plan's draft steps draw: on a device, known to the host once the device has done them.

Each step's tokens stay where they were drawn and are the next step's input, so no step waits for the host to have read
the one before. They are copied out together, behind the last step, and read once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stageline_runtime.accelerator.protocol import ComputeDevice
from stageline_runtime.plan_bus.messages import Drafted, DraftedRow, PlanRow
from stageline_runtime.stage.step.sampling_state import SlotSampling


@dataclass(slots=True, eq=False)
class DraftingRow:
    """A row while it is drafted for."""

    planned: PlanRow
    sampling: SlotSampling | None
    next_position: int = 0
    """Of the token that is drafted next."""
    num_drafted: int = 0

    def said(self, tokens: Sequence[int]) -> DraftedRow:
        first = self.next_position - self.num_drafted
        return DraftedRow(self.planned.slot, self.planned.generation, first, tuple(tokens))


Learn = Callable[[DraftingRow, Sequence[int]], None]
"""Called with the drafts of each row when they are read."""


def _nothing(_row: DraftingRow, _drafts: Sequence[int]) -> None:
    """What is drafted for no row teaches nothing."""


class PendingDrafts:
    """Filled by the drafter, step by step; then copied out, then read."""

    def __init__(self, seq: int, rows: Sequence[DraftingRow], device: ComputeDevice, learn: Learn = _nothing) -> None:
        """`rows`: all that the plan wants drafts for, also those that get none."""
        self._seq = seq
        self._rows = rows
        self._device = device
        self._learn = learn
        self._drawn_for: list[DraftingRow] = []
        self._drawn: list[Tensor] = []
        self._timed_steps = 0
        self._began = self._ended = self._copied = device.record(timed=True)
        self._tokens = torch.empty(0, dtype=torch.int64)

    def begin_timing(self) -> None:
        """The reported time of a step covers only the steps after this call."""
        self._began, self._timed_steps = self._device.record(timed=True), 0

    def add(self, rows: Sequence[DraftingRow], tokens: Tensor) -> None:
        """A step has drawn `tokens` `[num_rows]`, one for each of `rows`, of which there may be none."""
        self._timed_steps += 1
        self._drawn_for += rows
        self._drawn.append(tokens)

    def end(self) -> None:
        """There are no more steps."""
        self._ended = self._device.record(timed=True)
        if self._drawn_for:
            self._tokens = torch.cat(self._drawn)

    def copy_out(self) -> None:
        """Queue the copy of all tokens to the host."""
        if self._drawn_for:
            self._tokens = self._device.to_host(self._tokens)
        self._copied = self._device.record()

    def drafted(self) -> Drafted:
        """The drafts, after waiting for the copy; asked for once."""
        self._copied.wait()
        tokens: dict[DraftingRow, list[int]] = {row: [] for row in self._rows}
        for row, token in zip(self._drawn_for, self._tokens.tolist(), strict=True):
            tokens[row].append(token)
        for row, drafts in tokens.items():
            self._learn(row, drafts)
        seconds = self._ended.seconds_since(self._began) / self._timed_steps if self._timed_steps else 0.0
        return Drafted(self._seq, tuple(row.said(drafts) for row, drafts in tokens.items()), seconds)
