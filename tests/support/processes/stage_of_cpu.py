"""A stage on another CPU: `python stage_of_cpu.py CPUINFO_FILES`, which reads its features from CPUINFO_FILES with its
number behind it, where that file is there."""

import logging
import sys
from pathlib import Path

from stageline_runtime.contract import read_contract
from stageline_runtime.planning import cpu_features
from stageline_runtime.stage.process import StageProcess


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    contract = read_contract()
    given = Path(f"{sys.argv[1]}{contract.stage}")
    if given.exists():
        cpu_features.CPU_INFO = given
    sys.exit(StageProcess(contract).run())


if __name__ == "__main__":
    main()
