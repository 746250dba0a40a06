"""Which failure class an exception in a stage is: the one place where exceptions become termination messages."""

import re

import torch

from stageline_api.failures import CLASS_OF_EXIT_CODE, FailureClass
from stageline_runtime.models.weights.checkpoint import WeightsError
from stageline_runtime.plan_bus.bus import BusClosedError
from stageline_runtime.plan_bus.messages import BusProtocolError
from stageline_runtime.prepare.errors import PrepareError
from stageline_runtime.ranks.errors import RanksEndedError
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.protocol import PeerLostError


def as_failure(error: Exception) -> RuntimeFailure:
    """The failure that ends the stage; an unforeseen exception is class Internal."""
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
        case RanksEndedError():
            return RuntimeFailure(FailureClass.PEER_LOST, str(error), operation=error.operation)
        case WeightsError():
            return RuntimeFailure(FailureClass.MODEL_LOAD, error.message, operation="load weights")
        case PrepareError():
            failure_class = CLASS_OF_EXIT_CODE[error.exit_code]
            return RuntimeFailure(failure_class, error.message, operation="fetch weights")
        case torch.OutOfMemoryError():
            return device_memory_failure(error, "step")
        case MemoryError():
            return RuntimeFailure(FailureClass.OUT_OF_MEMORY, "the machine is out of memory", operation="load")
        case BusClosedError() | BusProtocolError():
            return RuntimeFailure(FailureClass.ENGINE_LOST, str(error), operation="plan bus")
        case _:
            return RuntimeFailure(FailureClass.INTERNAL, f"{type(error).__name__}: {error}")


def allocation_failure(error: RuntimeError) -> RuntimeFailure:
    """torch reports a failed allocation as a RuntimeError that names the size in its text."""
    if isinstance(error, torch.OutOfMemoryError):
        return device_memory_failure(error, "load")
    text = str(error).splitlines()[0]
    # "illegal memory access" is no shortage.
    if any(words in text.lower() for words in ("allocate memory", "out of memory")):
        return RuntimeFailure(FailureClass.OUT_OF_MEMORY, text, operation="load")
    return RuntimeFailure(FailureClass.MODEL_LOAD, text, operation="load")


_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WANTED = re.compile(r"Tried to allocate ([\d.]+) (\w+)")
_FREE = re.compile(r"of which ([\d.]+) (\w+) is free")


def device_memory_failure(error: torch.OutOfMemoryError, operation: str) -> RuntimeFailure:
    """torch's message names the requested and the free bytes; the difference is the shortage."""
    text = str(error).splitlines()[0]
    wanted, free = _bytes_in(_WANTED, text), _bytes_in(_FREE, text)
    if wanted is None or free is None:
        return RuntimeFailure(FailureClass.OUT_OF_MEMORY, text, operation=operation)
    missing = max(0, wanted - free)
    detail = (
        f"{missing >> 20} MiB of device memory are missing: {wanted >> 20} MiB were asked for with {free >> 20} MiB "
        "free; lower spec.engine.maxNumSeqs or maxModelLen, or use more stages"
    )
    return RuntimeFailure(FailureClass.OUT_OF_MEMORY, detail, operation=operation)


def _bytes_in(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return round(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None
