"""Which failure class an exception in a stage is: the one place where exceptions become last words."""

from stageline_api.failures import FailureClass
from stageline_runtime.bus import BusClosedError, BusProtocolError
from stageline_runtime.messages import GroupFailed
from stageline_runtime.models.checkpoint import WeightsError
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.protocol import PeerLostError


def as_failure(error: Exception) -> RuntimeFailure:
    """The failure that ends the stage; an exception nobody planned for is class Internal."""
    match error:
        case RuntimeFailure():
            return error
        case PeerLostError(timed_out=True):
            return RuntimeFailure(
                FailureClass.STEP_TIMEOUT, str(error), operation=error.operation, step=error.seq, peer=error.peer
            )
        case PeerLostError():
            return RuntimeFailure(
                FailureClass.PEER_LOST, str(error), operation=error.operation, step=error.seq, peer=error.peer
            )
        case WeightsError():
            return RuntimeFailure(FailureClass.MODEL_LOAD, error.message, operation="load weights")
        case MemoryError():
            return RuntimeFailure(FailureClass.OUT_OF_MEMORY, "the machine is out of memory", operation="load")
        case BusClosedError() | BusProtocolError():
            return RuntimeFailure(FailureClass.ENGINE_LOST, str(error), operation="plan bus")
        case _:
            return RuntimeFailure(FailureClass.INTERNAL, f"{type(error).__name__}: {error}")


def group_failure(message: GroupFailed, own_stage: int) -> RuntimeFailure:
    """What the engine's `GroupFailed` means here: a lost peer is named, all else is the engine's failure."""
    if message.lost_stage is None or message.lost_stage == own_stage:
        return RuntimeFailure(
            FailureClass.ENGINE_LOST, f"the engine ended the group: {message.detail}", operation="plan bus"
        )
    return RuntimeFailure(
        FailureClass.PEER_LOST,
        f"the engine lost stage {message.lost_stage}: {message.detail}",
        operation="plan bus",
        peer=message.lost_stage,
    )


def allocation_failure(error: RuntimeError) -> RuntimeFailure:
    """torch reports a failed allocation as a RuntimeError whose text names the size."""
    text = str(error).splitlines()[0]
    if "memory" in text.lower():
        return RuntimeFailure(FailureClass.OUT_OF_MEMORY, text, operation="load")
    return RuntimeFailure(FailureClass.MODEL_LOAD, text, operation="load")
