"""Entry point of a vLLM stage: starts with the pod contract, or writes a termination message about an invalid one."""

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
