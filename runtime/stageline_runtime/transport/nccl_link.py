"""One NCCL communicator of two ranks, made and tried out before any plan runs.

A communicator is made at its first use, and that needs both ends at once: every link carries one number when the stages
meet, in the order of the pipeline. No two GPUs have run this yet (docs/gpu.md).
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from stageline_runtime.accelerator.nccl import group_error, new_group
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.transport.nccl import NcclTransport
from stageline_runtime.transport.protocol import WireSizes

_POLL_SECONDS = 0.002


class NcclLink:
    """One end of a communicator; `peer` is the other end's rank, 0 upstream and 1 downstream."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer

    def send(self, tensor: Tensor) -> None:
        """Queue a send on the active stream."""
        self._group.send([tensor], self._peer, 0).wait()  # of the active stream: the host goes on

    def receive(self, tensor: Tensor) -> None:
        """Queue a receive on the active stream."""
        self._group.recv([tensor], self._peer, 0).wait()

    def error(self) -> str | None:
        """Whether NCCL has reported an error of an operation."""
        return group_error(self._group)

    def abort(self) -> None:
        """Give up everything outstanding."""
        self._group.abort()


def join_nccl(
    store: Store,
    accelerator: Accelerator,
    sizes: WireSizes,
    *,
    stage: int,
    stage_count: int,
    timeout_seconds: float,
    step_timeout_seconds: float,
) -> NcclTransport:
    """Make a stage's links and carry one number over each.

    Raises:
        RuntimeError: a communicator can't be made, or a peer did not answer in time.
    """
    last = stage_count - 1
    # NCCL's own limit comes last: the stage's watchdog has said by then which operation it was.
    link_seconds = 2 * max(timeout_seconds, step_timeout_seconds)
    before = _new_link(store, f"hidden/{stage - 1}", 1, link_seconds) if stage > 0 else None
    after = _new_link(store, f"hidden/{stage}", 0, link_seconds) if stage < last else None
    feedback = _new_link(store, "feedback", 0 if stage == last else 1, link_seconds) if stage in (0, last) else None
    _carry_one_number(accelerator, before, after, feedback, sends_feedback=stage == last)
    _await(accelerator, timeout_seconds)
    return NcclTransport(
        accelerator,
        before=before,
        after=after,
        feedback=feedback,
        stage=stage,
        stage_count=stage_count,
        sizes=sizes,
    )


def _carry_one_number(
    accelerator: Accelerator,
    before: NcclLink | None,
    after: NcclLink | None,
    feedback: NcclLink | None,
    *,
    sends_feedback: bool,
) -> None:
    """Queue it on every link, in an order in which all stages find their peers."""
    probe = torch.ones(1, device=accelerator.device)
    if before is not None:
        before.receive(probe)
    if after is not None:
        after.send(probe)
    if feedback is not None:
        (feedback.send if sends_feedback else feedback.receive)(probe)


def _await(accelerator: Accelerator, timeout_seconds: float) -> None:
    done = accelerator.main.record()
    deadline = time.monotonic() + timeout_seconds
    while not done.is_done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out: no first exchange over NCCL within {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)


def _new_link(store: Store, name: str, rank: int, timeout_seconds: float) -> NcclLink:
    """Raises RuntimeError where NCCL can't be had."""
    return NcclLink(new_group(PrefixStore(name, store), rank, 2, timeout_seconds), 1 - rank)
