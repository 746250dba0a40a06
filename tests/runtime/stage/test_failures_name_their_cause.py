"""Which class, operation and peer each exception of a stage is told as."""

import pytest
import torch

from stageline_api.failures import FailureClass
from stageline_runtime.models.weights.checkpoint import WeightsError
from stageline_runtime.plan_bus.bus import BusClosedError
from stageline_runtime.plan_bus.messages import BusProtocolError, GroupFailed
from stageline_runtime.stage.failures import allocation_failure, as_failure
from stageline_runtime.stage.group_end import group_failure
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.protocol import PeerLostError


@pytest.mark.parametrize(
    ("error", "failure_class", "peer", "step"),
    [
        (PeerLostError(2, "receive hidden", "Connection closed by peer", seq=9), FailureClass.PEER_LOST, 2, 9),
        (PeerLostError(1, "send hidden", "Timed out", seq=3, timed_out=True), FailureClass.STEP_TIMEOUT, 1, 3),
        (WeightsError("tensor x is missing"), FailureClass.MODEL_LOAD, None, None),
        (MemoryError(), FailureClass.OUT_OF_MEMORY, None, None),
        (torch.OutOfMemoryError("CUDA out of memory."), FailureClass.OUT_OF_MEMORY, None, None),
        (BusClosedError("gone"), FailureClass.ENGINE_LOST, None, None),
        (BusProtocolError("garbage"), FailureClass.ENGINE_LOST, None, None),
        (KeyError("surprise"), FailureClass.INTERNAL, None, None),
    ],
)
def test_exceptions(error: Exception, failure_class: FailureClass, peer: int | None, step: int | None) -> None:
    failure = as_failure(error)
    assert (failure.failure_class, failure.peer, failure.step) == (failure_class, peer, step)
    assert failure.detail


def test_a_failure_stays_what_it_is() -> None:
    failure = RuntimeFailure(FailureClass.BAD_CONFIG, "a sentence")
    assert as_failure(failure) is failure


@pytest.mark.parametrize(
    ("lost_stage", "failure_class", "peer"),
    [(1, FailureClass.PEER_LOST, 1), (0, FailureClass.ENGINE_LOST, None), (None, FailureClass.ENGINE_LOST, None)],
)
def test_what_the_engine_says_of_the_group(
    lost_stage: int | None, failure_class: FailureClass, peer: int | None
) -> None:
    """As told to stage 0: nobody blames itself."""
    failure = group_failure(GroupFailed(lost_stage, "the reason"), own_stage=0)
    assert (failure.failure_class, failure.peer) == (failure_class, peer)
    assert failure.detail.endswith(": the reason")


def test_an_allocation_that_failed_is_out_of_memory() -> None:
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8000 bytes\nframe 0")
    failure = allocation_failure(error)
    assert failure.failure_class is FailureClass.OUT_OF_MEMORY
    assert "\n" not in failure.detail
    for words in ("shape mismatch", "CUDA error: an illegal memory access was encountered"):
        assert allocation_failure(RuntimeError(words)).failure_class is FailureClass.MODEL_LOAD


CUDA_OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 139.20 GiB memory in use."
)


def test_a_device_without_memory_says_how_much_was_missing() -> None:
    error = torch.OutOfMemoryError(CUDA_OUT_OF_MEMORY)
    for failure, operation in ((allocation_failure(error), "load"), (as_failure(error), "step")):
        assert failure.failure_class is FailureClass.OUT_OF_MEMORY
        assert failure.operation == operation
        assert failure.detail.startswith("2048 MiB of device memory are missing: 2560 MiB were asked for with 512 MiB")


def test_words_that_torch_changes_are_passed_on() -> None:
    failure = as_failure(torch.OutOfMemoryError("the device is full\nframe 0"))
    assert (failure.failure_class, failure.detail) == (FailureClass.OUT_OF_MEMORY, "the device is full")
