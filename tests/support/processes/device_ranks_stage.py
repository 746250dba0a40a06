"""A stage whose ranks' devices are the CPU in disguise: `python device_ranks_stage.py`, under the pod contract.

Supervisor, ranks, their meeting, their exchanges, plans in flight and the staged transport are those of ranks on GPUs;
events are done late, attention is plain torch, and gloo carries what NCCL would.
"""

import os
import sys

from oracles.simulated_accelerator import LateAccelerator
from processes.gloo_ranks import GlooRanks
from stageline_api import env
from stageline_runtime.contract import PodContract, begin
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.planning.memory import USABLE_DEVICE_SHARE
from stageline_runtime.stage.devices import Devices
from stageline_runtime.stage.process import StageProcess
from stageline_runtime.stage.ranks.inherited import InheritedRank
from stageline_runtime.stage.ranks.supervisor import RankSupervisor

STOPPED_RANK = "SIMULATED_STOPPED_RANK"
"""Stands still as it joins the others."""
SHARED_DEVICE = "SIMULATED_SHARED_DEVICE"
"""Set: all ranks have the same."""
CACHE_BYTES = "SIMULATED_CACHE_BYTES"
"""What each device has left for the cache, by what is measured."""


class FullAccelerator(LateAccelerator):
    """Says that it is full but for `CACHE_BYTES` and the largest step."""

    def allocated_bytes(self) -> int:
        left = os.environ.get(CACHE_BYTES)
        if left is None:
            return super().allocated_bytes()
        step = self.peak_bytes(lambda: None)
        return int(self.available_bytes() * USABLE_DEVICE_SHARE) - step - int(left)


def main() -> None:
    contract = begin("stage")
    if contract.ranks > 1 and env.STAGE_RANK not in os.environ:
        sys.exit(RankSupervisor(contract, command=(__file__,)).run())
    sys.exit(_rank(contract).run())


def _rank(contract: PodContract) -> StageProcess:
    # Ranks of one number share a device over all stages, so that tensors between stages are staged.
    name = os.environ.get(SHARED_DEVICE) or f"simulated {contract.rank}"
    accelerator = FullAccelerator(2 * contract.stage + contract.rank, name)
    stopped = os.environ.get(STOPPED_RANK)
    backend = GlooRanks(None if stopped is None else int(stopped))
    devices = Devices(choose=lambda _asked: accelerator, attention=PlainAttention, rank_backend=backend)
    inherited = InheritedRank.read(contract.rank) if contract.ranks > 1 else None
    return StageProcess(contract, devices=devices, inherited=inherited)


if __name__ == "__main__":
    main()
