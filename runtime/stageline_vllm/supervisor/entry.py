"""How a vLLM stage begins: with the pod contract, or with the last words that say what is wrong with it."""

from stageline_runtime.contract import begin
from stageline_runtime.termination import RuntimeFailure, write_last_words


def run_stage() -> int:
    """Run one stage to its end; the exit code."""
    try:
        contract = begin("stage")
    except RuntimeFailure as failure:
        return write_last_words(failure.message(None))
    from stageline_vllm.supervisor.process import Supervisor

    return Supervisor(contract).run()
