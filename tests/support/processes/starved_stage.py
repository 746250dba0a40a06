"""A paced stage on a machine that is busy with others: `python starved_stage.py SECONDS_OF_STAGE_0 …`.

Its kernel says that some thread of the stage waits for a CPU all the time.
"""

import logging
import sys
from unittest import mock

from stageline_bench.runtime.group import paced_stage
from stageline_runtime.contract import read_contract
from stageline_runtime.stage.process import StageProcess
from stageline_runtime.stage.telemetry.cpu_waits import CpuWaits


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    contract = read_contract()
    builder = paced_stage.paced_model_builder(float(sys.argv[1 + contract.stage]), 0.0)
    with mock.patch.object(CpuWaits, "look", return_value=float("inf")):
        sys.exit(StageProcess(contract, builder).run())


if __name__ == "__main__":
    main()
