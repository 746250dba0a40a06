"""How a vLLM stage begins: with the pod contract, or with the last words that say what is wrong with it."""

import logging
import sys

from stageline_runtime.contract import read_contract
from stageline_runtime.termination import RuntimeFailure, write_last_words


def run_stage() -> int:
    """Run one stage to its end; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        contract = read_contract()
    except RuntimeFailure as failure:
        return write_last_words(failure.message(None))
    from stageline_vllm.supervisor.process import Supervisor

    return Supervisor(contract).run()
