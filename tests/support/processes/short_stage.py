"""A stage that believes in a small machine: `python short_stage.py BYTES`, under the pod contract.

Only the report of available memory is replaced, so that a group with a tiny model runs out of KV cache as a large one
does.
"""

import logging
import sys
from unittest import mock

from stageline_runtime.contract import read_contract
from stageline_runtime.stage.process import StageProcess


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    with mock.patch("stageline_runtime.stage.handshake.available_bytes", return_value=int(sys.argv[1])):
        sys.exit(StageProcess(read_contract()).run())


if __name__ == "__main__":
    main()
