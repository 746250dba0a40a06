"""The local transport: all stages of a group in one process, every delivery an event of a seeded interleaving.

A `LocalNetwork` gives each stage groups of the same form as gloo's, so rings, posting and naming are the very code
that gloo runs (`point_to_point`). It is as unhelpful as a network may be: a transfer begins once both ends are posted,
leaves the sender's tensor at one moment, reaches the receiver's buffer at a later one, and transfers overtake each
other. What a lucky network would forgive is an error here: a tensor written to before its send is complete, a buffer
read before its receive is (it holds nonsense until then), two ends that disagree about a shape, a plan posted twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from chaos.interleaving import Interleaving
from stageline_runtime.transport.point_to_point import PointToPointTransport
from stageline_runtime.transport.protocol import LoopbackTransport, Transport

NONSENSE = -0x5EED
"""What an incomplete receive's buffer holds."""
NO_TIMEOUT_SECONDS = 1e6
"""Time does not pass here; what would time out is a deadlock."""
Channel = Literal["hidden", "feedback"]


class WireError(Exception):
    """A transport was used in a way that a real network does not forgive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting:
    """A receive that a stage posted, in the order that all were."""

    stage: int
    channel: Channel
    seq: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class _End:
    """One end of a transfer."""

    tensor: Tensor
    complete: bool = False


@dataclass(slots=True)
class _Transfer:
    """One tensor's way from one stage to another."""

    name: str
    send: _End | None = None
    as_sent: Tensor | None = None
    """A copy made when the send began, and from then on what is under way."""
    receive: _End | None = None

    @property
    def may_move(self) -> bool:
        """Whether both ends are posted and the tensor has not arrived."""
        return self.send is not None and self.receive is not None and not self.receive.complete

    def move(self) -> None:
        """First leave the sender, then reach the receiver."""
        assert self.send is not None
        assert self.receive is not None
        assert self.as_sent is not None
        if not self.send.complete:
            if not torch.equal(self.send.tensor, self.as_sent):
                raise WireError(f"{self.name}: the tensor was written to before its send was complete")
            self.send.complete = True
        else:
            self.receive.tensor.copy_(self.as_sent)
            self.receive.complete = True

    def check_shapes(self) -> None:
        """Both ends must have derived the same shape and type from the plan."""
        if self.send is None or self.receive is None:
            return
        sent, expected = self.send.tensor, self.receive.tensor
        if sent.shape != expected.shape or sent.dtype != expected.dtype:
            raise WireError(
                f"{self.name}: {sent.dtype} of shape {tuple(sent.shape)} is sent, "
                f"{expected.dtype} of shape {tuple(expected.shape)} expected"
            )


@dataclass(slots=True)
class _Link:
    """All transfers of one channel from one stage to another."""

    name: str
    under_way: dict[int, _Transfer] = field(default_factory=dict)
    seen: set[tuple[str, int]] = field(default_factory=set)

    def transfer(self, end: str, tag: int) -> _Transfer:
        """The transfer of plan `tag`, one end of which is posted now."""
        if (end, tag) in self.seen:
            raise WireError(f"plan {tag}: {self.name} is posted twice by its {end}")
        self.seen.add((end, tag))
        return self.under_way.setdefault(tag, _Transfer(f"plan {tag}: {self.name}"))

    def movable(self) -> list[int]:
        """Plans whose tensors may move on now."""
        return [tag for tag, transfer in self.under_way.items() if transfer.may_move]

    def move(self, tag: int) -> None:
        """Move plan `tag`'s tensor one step on."""
        transfer = self.under_way[tag]
        transfer.move()
        if not transfer.may_move:
            del self.under_way[tag]


class LocalNetwork:
    """The links between the stages of one group."""

    def __init__(self, interleaving: Interleaving) -> None:
        self._interleaving = interleaving
        self._links: dict[tuple[Channel, int, int], _Link] = {}
        self.postings: list[Posting] = []
        """Every receive posted so far."""

    def transport(self, stage: int, stage_count: int, *, hidden_size: int, dtype: torch.dtype) -> Transport:
        """One stage's transport; to be used by a task of the interleaving only."""
        if stage_count == 1:
            return LoopbackTransport()
        return PointToPointTransport(
            ChannelEnd(self, stage, "hidden"),
            ChannelEnd(self, stage, "feedback"),
            stage=stage,
            stage_count=stage_count,
            hidden_size=hidden_size,
            dtype=dtype,
            step_timeout_seconds=NO_TIMEOUT_SECONDS,
        )

    def outstanding(self) -> list[str]:
        """Transfers that are not complete at both ends."""
        return [transfer.name for link in self._links.values() for transfer in link.under_way.values()]

    def post(self, channel: Channel, source: int, target: int, tag: int, tensor: Tensor, *, sends: bool) -> "LocalWork":
        """Post one end of a transfer, after others had a chance to go first."""
        self._interleaving.give_way()
        link = self._link(channel, source, target)
        transfer = link.transfer("sender" if sends else "receiver", tag)
        end = _End(tensor)
        if sends:
            transfer.send, transfer.as_sent = end, tensor.clone()
        else:
            tensor.fill_(NONSENSE)
            transfer.receive = end
            self.postings.append(Posting(stage=target, channel=channel, seq=tag, shape=tuple(tensor.shape)))
        transfer.check_shapes()
        role = f"sends {channel} to stage {target}" if sends else f"receives {channel} from stage {source}"
        return LocalWork(self._interleaving, lambda: end.complete, f"plan {tag}, {role}")

    def _link(self, channel: Channel, source: int, target: int) -> _Link:
        link = self._links.get((channel, source, target))
        if link is None:
            link = _Link(f"{channel} from stage {source} to stage {target}")
            self._links[channel, source, target] = link
            self._interleaving.add_event(link.name, lambda: bool(link.movable()), partial(self._move_one, link))
        return link

    def _move_one(self, link: _Link) -> None:
        link.move(self._interleaving.choose(link.movable()))


class ChannelEnd:
    """One stage's end of a channel; implements `PointToPointGroup`."""

    def __init__(self, network: LocalNetwork, stage: int, channel: Channel) -> None:
        self._network = network
        self._stage = stage
        self._channel = channel

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "LocalWork":
        """Begin to send."""
        (tensor,) = tensors
        return self._network.post(self._channel, self._stage, peer, tag, tensor, sends=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "LocalWork":
        """Begin to receive."""
        (tensor,) = tensors
        return self._network.post(self._channel, peer, self._stage, tag, tensor, sends=False)

    def abort(self) -> None:
        """Nothing to let go of: the network ends with its interleaving."""


class LocalWork:
    """The handle of one end of a transfer."""

    def __init__(self, interleaving: Interleaving, complete: Callable[[], bool], waits_for: str) -> None:
        self._interleaving = interleaving
        self._complete = complete
        self._waits_for = waits_for

    def wait(self, timeout: timedelta) -> bool:
        """Block until done; others go on meanwhile. Time does not pass, so `timeout` never runs out."""
        assert timeout.total_seconds() > 0
        self._interleaving.wait_until(self._complete, self._waits_for)
        return True
