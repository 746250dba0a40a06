"""How stages meet over NCCL: one communicator of two ranks per link, created and tested before any plan runs.

NCCL's ends find each other in torch's TCPStore on stage 0, under a name that can't be guessed without the bus's token.
NCCL creates a communicator at its first use, which needs both ends at once. So when the stages meet, every link carries
one number, in pipeline order.
"""

import socket
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.nccl import new_group
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.challenge import store_name
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.nccl import NcclLink, NcclTransport
from stageline_runtime.transport.protocol import WireSizes

_POLL_SECONDS = 0.002


def meet_over_nccl(contract: PodContract, accelerator: Accelerator, sizes: WireSizes) -> NcclTransport:
    """Meet the other stages and connect.

    Raises:
        RuntimeFailure: class RendezvousTimeout when not all stages came in time, PeerLost when one came and went.
    """
    timeouts = contract.config.timeouts
    life = f"{contract.config.model_name}/{contract.group}/{contract.incarnation}"
    name = f"{store_name(contract.bus_token, life)}/rank-{contract.rank}"
    try:
        store = _open_store(contract, timedelta(seconds=timeouts.rendezvous_seconds))
        return join_nccl(
            PrefixStore(name, store),
            accelerator,
            sizes,
            stage=contract.stage,
            stage_count=contract.stage_count,
            timeout_seconds=timeouts.rendezvous_seconds,
            step_timeout_seconds=timeouts.step_seconds,
        )
    except RuntimeError as error:
        raise _failure(contract, str(error).splitlines()[0]) from error


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
    return NcclLink(new_group(PrefixStore(name, store), rank, 2, timeout_seconds, is_link=True), 1 - rank)


def _open_store(contract: PodContract, timeout: timedelta) -> TCPStore:
    """Listens only on the pod's own address; the default TCPStore listens on every address of the machine."""
    is_master = contract.stage == 0 and contract.rank == 0
    where = (contract.pod_ip if is_master else contract.master_addr, contract.master_port, contract.stage_count)
    if not is_master:
        return TCPStore(*where, is_master=False, timeout=timeout, wait_for_workers=False)
    try:
        listener = socket.create_server(where[:2], backlog=128)
    except OSError as error:
        detail = f"can't listen on {where[0]}:{where[1]}: {error.strerror}"
        raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error
    # The store takes the descriptor over and closes it.
    descriptor = listener.detach()
    return TCPStore(*where, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor)


def _failure(contract: PodContract, reason: str) -> RuntimeFailure:
    """Peers that did not come in time, or one that came and went; torch tells them apart by its words alone."""
    place = f"stage {contract.stage} did not meet its peers at {contract.master_addr}:{contract.master_port}"
    if any(words in reason.lower() for words in ("timeout", "timed out")):
        detail = f"{place} within {contract.config.timeouts.rendezvous_seconds:g} s: {reason}"
        return RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, detail, operation="rendezvous")
    # The store is of stage 0's first rank, and goes with it.
    peer = None if contract.stage == 0 else 0
    return RuntimeFailure(FailureClass.PEER_LOST, f"{place}: {reason}", operation="rendezvous", peer=peer)
