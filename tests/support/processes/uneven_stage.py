"""A paced stage with a pace of its own: `python uneven_stage.py SLEPT_FILES SECONDS_OF_STAGE_0 SECONDS_OF_STAGE_1 …`.

Under the pod contract, like `stageline_bench.runtime.group.paced_stage`, which gives all stages one pace. How long each
plan really slept, which a loaded machine makes longer, is written to SLEPT_FILES with the stage's number behind it, a
line for each plan: so a test knows it from elsewhere than the stage's own clock.
"""

import logging
import sys
import time
from pathlib import Path
from unittest import mock

from stageline_bench.runtime.group import paced_stage
from stageline_runtime.contract import read_contract
from stageline_runtime.stage.process import StageProcess


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    contract = read_contract()
    seconds_per_step = float(sys.argv[2 + contract.stage])
    sleep = time.sleep
    with Path(f"{sys.argv[1]}{contract.stage}").open("w", buffering=1, encoding="utf-8") as slept:

        def timed_sleep(seconds: float) -> None:
            begin = time.perf_counter()
            sleep(seconds)
            slept.write(f"{time.perf_counter() - begin}\n")

        with mock.patch.object(paced_stage, "time", mock.Mock(sleep=timed_sleep)):
            builder = paced_stage.paced_model_builder(seconds_per_step, 0.0)
            code = StageProcess(contract, builder).run()
    sys.exit(code)


if __name__ == "__main__":
    main()
