"""How a stage joins its peers once it has loaded: over sockets, which the engine's welcome leads to, or over NCCL.

Rank r of every stage meets rank r of the others, so a stage's links carry the same bytes whatever its ranks: each its
part of a hidden tensor, of which the ranks of the receiving stage gather the whole. Sampled rows cross whole on every
link, so that each rank of the first stage learns them.
"""

import socket
from typing import Final

import torch
from torch import Tensor

from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract, read_identity
from stageline_runtime.plan_bus.messages import BusProtocolError, LinkAddress, TransportKind
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, Transport, WireSizes
from stageline_runtime.transport.ring import join_ring
from stageline_runtime.transport.socket_link import SocketReceiver, SocketSender
from stageline_runtime.transport.socket_transport import SocketTransport, StagedTransport

GATHER_HIDDEN: Final = "all-gather, hidden"
PATIENT_STEPS: Final = 10
"""How many step limits a transport waits. The watchdog gives up earlier, unless the other stage reports that it
computes."""


def join(
    contract: PodContract,
    kind: TransportKind,
    sizes: WireSizes,
    *,
    accelerator: Accelerator | None,
    listener: socket.socket,
    next_address: LinkAddress | None,
) -> Transport:
    """Meet the other stages and connect. `kind` and `next_address` are the engine's words; closes `listener`.

    Raises:
        RuntimeFailure: class RendezvousTimeout when not all stages came in time, PeerLost when one came and went.
        BusProtocolError: the engine's words can't be followed.
    """
    with listener:
        if kind is TransportKind.NCCL:
            return _over_nccl(contract, sizes, accelerator)
        if next_address is None:
            raise BusProtocolError(f"Welcome.next_address is missing for stage {contract.stage}")
        wire = _over_sockets(contract, listener, next_address, sizes)
    return wire if accelerator is None else StagedTransport(wire, accelerator, sizes)


def _over_nccl(contract: PodContract, sizes: WireSizes, accelerator: Accelerator | None) -> Transport:
    if accelerator is None or contract.config.tls is not None:
        lack = "no device" if accelerator is None else "spec.network.tls, which NCCL has not"
        raise BusProtocolError(f"Welcome.transport is nccl, and stage {contract.stage} has {lack}")
    from stageline_runtime.transport.nccl_meeting import meet_over_nccl  # torch.distributed costs time

    return meet_over_nccl(contract, accelerator, sizes)


def _over_sockets(
    contract: PodContract, listener: socket.socket, next_address: LinkAddress, sizes: WireSizes
) -> SocketTransport:
    if contract.config.tls is not None and contract.ranks != 1:
        detail = "spec.network.tls is for stages of one rank only"
        raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="rendezvous")
    after, before = join_ring(contract, listener, next_address, read_identity(contract.config))
    dtype, width = (torch.int64, FEEDBACK_WIDTH) if contract.stage == 0 else (sizes.dtype, sizes.hidden_size)
    wait_seconds = PATIENT_STEPS * contract.config.timeouts.step_seconds
    return SocketTransport(
        SocketSender(after),
        SocketReceiver(before, dtype, width, wait_seconds),
        stage=contract.stage,
        stage_count=contract.stage_count,
        step_timeout_seconds=wait_seconds,
    )


class RankLane:
    """A `Transport`; `inner` is this rank's lane, for hidden tensors of `hidden_size / ranks.size` columns."""

    def __init__(self, inner: Transport, ranks: RankGroup) -> None:
        self._inner = inner
        self._ranks = ranks
        self.post_hidden = inner.post_hidden
        self.hidden_has_come = inner.hidden_has_come
        self.would_block = inner.would_block
        self.check = inner.check
        self.post_feedback = inner.post_feedback
        self.wait_feedback = inner.wait_feedback
        self.send_feedback = inner.send_feedback

    def wait_hidden(self, seq: int) -> Tensor:
        """The whole `[num_tokens, hidden_size]` of plan `seq`, once every rank has its part; raises PeerLostError."""
        parts = self._ranks.all_gather(self._inner.wait_hidden(seq), GATHER_HIDDEN)
        return parts.movedim(0, 1).flatten(1)

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Send this rank's columns of `[num_tokens, hidden_size]`, which all ranks hold; raises PeerLostError."""
        width = hidden.shape[1] // self._ranks.size
        self._inner.send_hidden(seq, hidden[:, self._ranks.rank * width : (self._ranks.rank + 1) * width])
