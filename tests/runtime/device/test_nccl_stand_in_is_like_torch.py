"""The stand-in for NCCL offers nothing that the installed torch lacks, and refuses what torch's own class refuses.

A `WorkNCCL` can't be made without a GPU, so its methods are looked up on the class that Python sees, and the refusal
in the words of the library that holds it. Where torch is built without NCCL there is nothing to hold against.
"""

import mmap
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from oracles.simulated_accelerator import SimulatedAccelerator
from oracles.simulated_nccl import (
    IS_SUCCESS_REFUSAL,
    SimulatedCommunicator,
    SimulatedErrorType,
    SimulatedProcessGroup,
    SimulatedWork,
)

NCCL_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
needs_nccl = pytest.mark.skipif(not hasattr(c10d, "ProcessGroupNCCL"), reason="this torch is built without NCCL")


def public_names(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_an_operation_has_no_method_that_torchs_lacks() -> None:
    assert public_names(SimulatedWork) - public_names(c10d.Work) == set()


@needs_nccl
def test_a_group_has_no_method_that_torchs_lacks() -> None:
    real = c10d.ProcessGroupNCCL
    assert public_names(SimulatedProcessGroup) - public_names(real) == set()


@needs_nccl
def test_errors_have_torchs_names() -> None:
    assert {error.name for error in SimulatedErrorType} == set(c10d.ErrorType.__members__)


def test_an_operation_that_went_well_refuses_to_say_so() -> None:
    device = SimulatedAccelerator(0)
    work = SimulatedProcessGroup(SimulatedCommunicator(), device).send([torch.zeros(1)], 1, 0)
    with pytest.raises(NotImplementedError) as refusal:
        work.is_success()
    assert str(refusal.value) == IS_SUCCESS_REFUSAL


@needs_nccl
@pytest.mark.skipif(not NCCL_LIBRARY.is_file(), reason=f"this torch has no {NCCL_LIBRARY.name}")
def test_the_refusal_is_in_torchs_library() -> None:
    with NCCL_LIBRARY.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert library.find(IS_SUCCESS_REFUSAL.encode()) >= 0, (
            f"torch {torch.__version__} no longer refuses is_success in these words: look at WorkNCCL::isSuccess again"
        )
