"""A stage process whose device is the CPU in disguise: `python late_device_stage.py`, under the pod contract.

Its events are done late, its attention is plain torch, its graphs are noted operations; process, plans in flight,
staged transport and sampling are those of a stage on a GPU.
"""

import os
import sys

from oracles.simulated_accelerator import LateAccelerator
from stageline_runtime.contract import read_contract
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.stage.devices import Devices
from stageline_runtime.stage.process import StageProcess


def main() -> None:
    contract = read_contract()
    device = os.environ.get("SIMULATED_DEVICE", "simulated")
    accelerator = None if device == "cpu" else LateAccelerator(contract.stage, device)
    devices = Devices(choose=lambda _asked: accelerator, attention=PlainAttention)
    sys.exit(StageProcess(contract, devices=devices).run())


if __name__ == "__main__":
    main()
