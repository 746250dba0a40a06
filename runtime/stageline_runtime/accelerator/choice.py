"""Which device a stage computes on: what its config asks for, or an accelerator where one is visible."""

import logging
import os

import torch

from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.termination import RuntimeFailure

logger = logging.getLogger(__name__)


def choose_accelerator(asked: str) -> Accelerator | None:
    """The accelerator to compute on, None for the CPU. `asked` is `spec.engine.device`.

    Raises:
        RuntimeFailure: class BadConfig: a device was asked for that this container doesn't have.
    """
    if asked == "cpu":
        return None
    # Loading a kernel waits for running ones; one that waits for a peer, which waits for us, would never end.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if torch.cuda.is_available():
        from stageline_runtime.accelerator.cuda import CudaAccelerator

        accelerator = CudaAccelerator()
        logger.info("computing on %s", accelerator.identity())
        return accelerator
    if asked == "auto":
        return None
    raise RuntimeFailure(
        FailureClass.BAD_CONFIG,
        f"spec.engine.device is {asked}, but {_why_not()}; give the stage a GPU (resources nvidia.com/gpu) or set it "
        "to auto or cpu",
        operation="choose the device",
    )


def _why_not() -> str:
    if torch.version.cuda is None:
        return "this image's torch is built without CUDA"
    return f"no CUDA device is visible to torch {torch.__version__}"
