"""The device's copies of a plan's table and of the slots' block tables: buffers made at load, filled by small copies.

The host's side is pinned memory, given anew for each copy: torch keeps it until the copy out of it is done.
"""

import torch

from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.models.device.attention import DeviceRows
from stageline_runtime.models.device.block_tables import BlockTables
from stageline_runtime.models.device.step_rows import StepRows

_TOKEN, _TILE = 2, 4


class StepTable:
    """Room for plans of up to `max_tokens` tokens."""

    def __init__(self, accelerator: Accelerator, max_tokens: int, blocks: BlockTables, num_slots: int) -> None:
        # A token, a decode tile and, should chunks be short, a prefill tile for every two tokens.
        size = max_tokens * (_TOKEN + _TILE) + (max_tokens + 1) // 2 * _TILE
        self._accelerator = accelerator
        self._blocks = blocks
        self._table = torch.zeros(size, dtype=torch.int32, device=accelerator.device)
        # What no slot has yet, and what padding has, is the block behind the last.
        self._block_table = torch.full(
            (num_slots + 1, blocks.blocks_per_slot), blocks.num_blocks, dtype=torch.int32, device=accelerator.device
        )

    def fill(self, rows: StepRows) -> DeviceRows:
        """Queue the copy of a plan's table; what is returned views the one buffer, so it holds until the next plan."""
        for slot, end in rows.written:
            self._blocks.reserve(slot, end)
        changes = self._blocks.take_changes()
        if changes:
            places, blocks = self._accelerator.place(torch.tensor(changes, dtype=torch.int64)).unbind(1)
            self._block_table.view(-1)[places] = blocks.to(torch.int32)
        flat = torch.tensor(rows.flat(), dtype=torch.int32)
        staged = self._accelerator.pinned(tuple(flat.shape), flat.dtype).copy_(flat)
        self._accelerator.copy(self._table[: len(flat)], staged)
        return self.view(len(rows.tokens), len(rows.decode_tiles), len(rows.prefill_tiles))

    def view(self, num_tokens: int, num_decode_tiles: int, num_prefill_tiles: int = 0) -> DeviceRows:
        """Where the table's parts lie for a plan of these sizes."""
        tokens_end = num_tokens * _TOKEN
        decode_end = tokens_end + num_decode_tiles * _TILE
        prefill_end = decode_end + num_prefill_tiles * _TILE
        return DeviceRows(
            tokens=self._table[:tokens_end].view(-1, _TOKEN),
            decode_tiles=self._table[tokens_end:decode_end].view(-1, _TILE),
            prefill_tiles=self._table[decode_end:prefill_end].view(-1, _TILE),
            block_table=self._block_table,
        )
