"""A communicator of two ranks on simulated streams, in place of torch's `ProcessGroupNCCL` and its `WorkNCCL`.

It offers what those offer under the same names, and refuses what `WorkNCCL` refuses, so that code that asks for it
fails here too; a test holds names and `is_success`'s refusal against the installed torch. Errors appear as they do
there: what is under way hangs until torch's watchdog has found and noted the error and aborted the communicator; the
group tells.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn, cast

import torch
from torch.distributed import DistBackendError

from oracles.simulated_accelerator import SimulatedAccelerator, SimulatedStream
from stageline_runtime.accelerator.protocol import Event

IS_SUCCESS_REFUSAL = "WorkNCCL::isSuccess() is deprecated"
"""What `WorkNCCL` says, word for word."""
REFUSAL = "NCCL communicator was aborted"
"""What `ProcessGroupNCCL` says of an operation on a communicator that is gone, in a DistBackendError."""


class SimulatedErrorType(Enum):
    """torch's `ErrorType`."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    REMOTE_ERROR = 3


@dataclass(eq=False)
class SimulatedCommunicator:
    """What both ranks share: what is under way, and what went wrong."""

    sent: deque[torch.Tensor] = field(default_factory=deque)
    seen_by_watchdog: SimulatedErrorType = SimulatedErrorType.SUCCESS
    is_aborted: bool = False
    is_refusing: bool = False
    """New operations are refused, as on a communicator that torch has aborted."""
    num_received: int = 0

    def end_by_watchdog(self, error: SimulatedErrorType) -> None:
        """The watchdog notes an error and aborts the communicator; what was under way ends without a result."""
        self.seen_by_watchdog, self.is_aborted = error, True


class SimulatedWork:
    """One operation."""

    def __init__(self, device: SimulatedAccelerator, done: Event) -> None:
        self._device = device
        self._done = done

    def exception(self) -> NoReturn:
        """Not to be asked: torch 2.11, the oldest that a stage runs on, can't tell Python of one, though 2.13 can."""
        raise TypeError("Unable to convert function return value to a Python type!")

    def is_success(self) -> NoReturn:
        """Refused, as by `WorkNCCL`."""
        raise NotImplementedError(IS_SUCCESS_REFUSAL)

    def wait(self) -> bool:
        """The active stream waits; the host goes on."""
        self._device.current.wait_for(self._done)
        return True


class SimulatedProcessGroup:
    """One rank. Its operations run on a stream of its own, and wait for the peer as NCCL's kernels do."""

    def __init__(self, communicator: SimulatedCommunicator, device: SimulatedAccelerator) -> None:
        self._communicator = communicator
        self._device = device
        self._stream = cast(SimulatedStream, device.side_stream())

    def send(self, tensors: list[torch.Tensor], _peer: int, _tag: int) -> SimulatedWork:
        """The buffer has to stay as it is until the peer has taken it."""
        (tensor,), communicator = tensors, self._communicator
        self._refuse()
        self._stream.wait_for(self._device.current.record())
        self._stream.queue(lambda: communicator.sent.append(tensor))
        self._stream.tasks.append(
            lambda: communicator.is_aborted or not any(waiting is tensor for waiting in communicator.sent)
        )
        return self._work()

    def recv(self, tensors: list[torch.Tensor], _peer: int, _tag: int) -> SimulatedWork:
        """Take what the peer sends."""
        (tensor,), communicator = tensors, self._communicator
        self._refuse()

        def take() -> bool:
            if communicator.is_aborted:
                return True
            if communicator.sent:
                tensor.copy_(communicator.sent[0])
                communicator.sent.popleft()
                communicator.num_received += 1
                return True
            return False

        self._stream.wait_for(self._device.current.record())
        self._stream.tasks.append(take)
        return self._work()

    def get_error(self) -> SimulatedErrorType:
        """The first error that the watchdog has seen."""
        return self._communicator.seen_by_watchdog

    def _refuse(self) -> None:
        if self._communicator.is_refusing:
            raise DistBackendError(REFUSAL)

    def _work(self) -> SimulatedWork:
        return SimulatedWork(self._device, self._stream.record())
