"""A stage, or a rank of one, on a card that it shares: `python -m stageline_bench.gpu_check.shared_card`.

NCCL refuses two ranks on one device of one host, and identifies hosts by `NCCL_HOSTID`. With its own id each process is
a node, so one card shows the behaviour of pods on TCP: NCCL over sockets. The engine uses the device's name to decide
whether processes have a device each. NVLink, RDMA and speed can't be checked: the processes share the card's time.
"""

import os
import sys

from stageline_api import env
from stageline_runtime.accelerator.cuda import CudaAccelerator
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract, begin
from stageline_runtime.stage.devices import Devices
from stageline_runtime.stage.process import StageProcess
from stageline_runtime.stage.ranks.inherited import InheritedRank
from stageline_runtime.stage.ranks.supervisor import RankSupervisor

STAGE_COMMAND = ("-m", "stageline_bench.gpu_check.shared_card")
PART_OF_THE_CARD = 16
"""Each process claims this part of the free memory."""


class SharedCard(CudaAccelerator):
    """The card as process `name` sees it: its own device, with a part of the memory."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def identity(self) -> str:
        return f"{super().identity()} for {self._name}"

    def available_bytes(self) -> int:
        return super().available_bytes() // PART_OF_THE_CARD


def node_environment(name: str) -> dict[str, str]:
    """Environment that makes a process its own NCCL node, on the loopback interface."""
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def main() -> None:
    contract = begin("stage")
    if contract.ranks > 1 and env.STAGE_RANK not in os.environ:
        sys.exit(RankSupervisor(contract, command=STAGE_COMMAND).run())
    sys.exit(_process(contract).run())


def _process(contract: PodContract) -> StageProcess:
    name = f"stage {contract.stage} rank {contract.rank}"
    os.environ.update(node_environment(name.replace(" ", "-")))
    inherited = InheritedRank.read(contract.rank) if contract.ranks > 1 else None

    def choose(_asked: str) -> Accelerator:
        return SharedCard(name)

    return StageProcess(contract, devices=Devices(choose=choose), inherited=inherited)


if __name__ == "__main__":
    main()
