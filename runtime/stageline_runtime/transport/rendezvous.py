"""How the stages of one incarnation meet and connect: torch's TCPStore on stage 0, keyed by incarnation and rank.

Rank r of every stage meets rank r of the others.

The store listens on the pod's own address alone (a listening socket is handed in, because TCPStore by itself would
listen on every address of the machine). Process groups are made directly rather than through the global default, so
that nothing in a stage depends on global state.
"""

import socket
from datetime import timedelta
from typing import Any, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.challenge import store_name
from stageline_runtime.plan_bus.messages import TransportKind
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.guarded_store import GuardedStore
from stageline_runtime.transport.plain_link import PlainReceiver, PlainSender
from stageline_runtime.transport.plain_ring import join_plain_ring
from stageline_runtime.transport.plain_transport import PlainTransport
from stageline_runtime.transport.point_to_point import PointToPointGroup, PointToPointTransport
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, Transport, WireSizes
from stageline_runtime.transport.secure_link import SecureGroup, SecureReceiver, SecureSender
from stageline_runtime.transport.secure_ring import join_secure_ring
from stageline_runtime.transport.staged import StagedTransport


def join(
    contract: PodContract,
    kind: TransportKind,
    sizes: WireSizes,
    *,
    accelerator: Accelerator | None,
    next_address: str = "",
) -> Transport:
    """Meet the other stages and connect. `next_address` is where the next stage is, and only asked for with TLS.

    Raises:
        RuntimeFailure: class RendezvousTimeout when not all stages came in time, PeerLost when one came and went.
    """
    wire: Transport
    if contract.config.tls is not None:
        assert kind is not TransportKind.NCCL, "NCCL has no TLS"
        if contract.ranks != 1:
            detail = "spec.network.tls is for stages of one rank only"
            raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="rendezvous")
        wire = _join_secure_ring(contract, sizes, next_address)
        return wire if accelerator is None else StagedTransport(wire, accelerator, sizes)
    try:
        store = _open_store(contract, timedelta(seconds=contract.config.timeouts.rendezvous_seconds))
        life = f"{contract.config.model_name}/{contract.group}/{contract.incarnation}"
        name = f"{store_name(contract.bus_token, life)}/rank-{contract.rank}"
        if kind is TransportKind.NCCL:
            assert accelerator is not None, "nccl needs a device on every stage"
            # Not guarded: NCCL's own threads may ask it at any time, and would wait for the interpreter.
            return _join_nccl(contract, PrefixStore(name, store), sizes, accelerator)
        wire = _join_in_clear(contract, GuardedStore(store, contract.bus_token), name, sizes)
    except RuntimeError as error:
        raise _failure(contract, str(error).splitlines()[0]) from error
    return wire if accelerator is None else StagedTransport(wire, accelerator, sizes)


def _join_nccl(contract: PodContract, scope: Store, sizes: WireSizes, accelerator: Accelerator) -> Transport:
    from stageline_runtime.transport.nccl_link import join_nccl  # only where there are devices

    return join_nccl(
        scope,
        accelerator,
        sizes,
        stage=contract.stage,
        stage_count=contract.stage_count,
        timeout_seconds=contract.config.timeouts.rendezvous_seconds,
        step_timeout_seconds=contract.config.timeouts.step_seconds,
    )


def _join_in_clear(contract: PodContract, store: GuardedStore, scope: str, sizes: WireSizes) -> Transport:
    if contract.config.transport == "gloo":
        return _join_gloo(contract, store, scope, sizes)
    after, before = join_plain_ring(contract, store, scope)
    dtype, width = (torch.int64, FEEDBACK_WIDTH) if contract.stage == 0 else (sizes.dtype, sizes.hidden_size)
    step_seconds = contract.config.timeouts.step_seconds
    return PlainTransport(
        PlainSender(after),
        PlainReceiver(before, dtype, width, step_seconds),
        stage=contract.stage,
        stage_count=contract.stage_count,
        step_timeout_seconds=step_seconds,
        store=store,
    )


def _join_gloo(contract: PodContract, store: GuardedStore, scope: str, sizes: WireSizes) -> PointToPointTransport:
    timeouts = contract.config.timeouts
    groups = [
        ProcessGroupGloo(
            PrefixStore(f"{scope}/{name}", store),
            contract.stage,
            contract.stage_count,
            _options(contract, timeouts.rendezvous_seconds),
        )
        for name in ("hidden", "feedback")
    ]
    return PointToPointTransport(
        cast(PointToPointGroup, groups[0]),
        cast(PointToPointGroup, groups[1]),
        stage=contract.stage,
        stage_count=contract.stage_count,
        hidden_size=sizes.hidden_size,
        dtype=sizes.dtype,
        step_timeout_seconds=timeouts.step_seconds,
        store=store,
    )


def _join_secure_ring(contract: PodContract, sizes: WireSizes, next_address: str) -> PointToPointTransport:
    after, before = join_secure_ring(contract, next_address)
    sender, receiver = SecureSender(after), SecureReceiver(before)
    is_first, is_last = contract.stage == 0, contract.stage == contract.stage_count - 1
    return PointToPointTransport(
        # The first stage receives feedback and the last one sends it; all else is hidden tensors.
        SecureGroup(None if is_last else sender, None if is_first else receiver),
        SecureGroup(sender if is_last else None, receiver if is_first else None),
        stage=contract.stage,
        stage_count=contract.stage_count,
        hidden_size=sizes.hidden_size,
        dtype=sizes.dtype,
        step_timeout_seconds=contract.config.timeouts.step_seconds,
    )


def _failure(contract: PodContract, reason: str) -> RuntimeFailure:
    """Peers that did not come in time, or one that came and went; torch tells them apart by its words alone."""
    place = f"stage {contract.stage} did not meet its peers at {contract.master_addr}:{contract.master_port}"
    words = reason.lower()
    if "timeout" in words or "timed out" in words:
        limit_seconds = contract.config.timeouts.rendezvous_seconds
        detail = f"{place} within {limit_seconds:g} s: {reason}"
        return RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, detail, operation="rendezvous")
    # The store is of stage 0's first rank, and goes with it.
    peer = None if contract.stage == 0 else 0
    return RuntimeFailure(FailureClass.PEER_LOST, f"{place}: {reason}", operation="rendezvous", peer=peer)


def _open_store(contract: PodContract, timeout: timedelta) -> TCPStore:
    if contract.stage != 0 or contract.rank != 0:
        return TCPStore(
            contract.master_addr,
            contract.master_port,
            contract.stage_count,
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,
        )
    try:
        listener = socket.create_server((contract.pod_ip, contract.master_port), backlog=128)
    except OSError as error:
        detail = f"can't listen on {contract.pod_ip}:{contract.master_port}: {error.strerror}"
        raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error
    return TCPStore(
        contract.pod_ip,
        contract.master_port,
        contract.stage_count,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # The store takes the descriptor over and closes it.
        master_listen_fd=listener.detach(),
    )


def _options(contract: PodContract, timeout_seconds: float) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
    interface = contract.config.network_interface
    if interface:
        device = ProcessGroupGloo.create_device(interface=interface)
    else:
        device = ProcessGroupGloo.create_device(hostname=contract.pod_ip)
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_seconds)
    options._threads = 1
    return options
