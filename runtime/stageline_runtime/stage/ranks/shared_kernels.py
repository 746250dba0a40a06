"""Why ranks can't share memory without the compiled exchanges, as the stage's failure. Without torch.

A missing compiler is a configuration error, which a restart doesn't fix. An unfinished compilation is not: the
next start may find a quieter machine.
"""

from stageline_api.failures import FailureClass
from stageline_runtime.native.build import CompilerTooLateError, NativeUnavailableError
from stageline_runtime.termination import RuntimeFailure


def no_shared_memory(ranks: int, error: NativeUnavailableError, operation: str) -> RuntimeFailure:
    """Class BadConfig, or ModelLoad where another start may go better."""
    failure_class = FailureClass.MODEL_LOAD if isinstance(error, CompilerTooLateError) else FailureClass.BAD_CONFIG
    detail = f"spec.parallelism: {ranks} ranks can't share memory: {error}"
    return RuntimeFailure(failure_class, detail, operation=operation)
