"""The local transport: all stages of a group in one process, every delivery an event of a seeded interleaving.

A `LocalNetwork` gives each stage ends of the same form as a socket's, so posting, bounds and naming are the very code
that sockets run (`SocketTransport`). It is as unhelpful as a network may be: a tensor stays in the sender's memory
until its receive is posted, and longer. What a lucky network would forgive is an error here: a tensor written to before
it has left, one read longer than it is good for (it holds nonsense then), two ends that disagree about a shape, a plan
posted twice.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor

from chaos.interleaving import Interleaving
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, LoopbackTransport, Transport
from stageline_runtime.transport.socket_link import RECEIVE_RING, SocketReceiver, SocketSender
from stageline_runtime.transport.socket_transport import SocketTransport

NONSENSE = -0x5EED
"""What a received tensor's memory holds once it may be another's."""
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


@dataclass(slots=True, eq=False)
class _Sent:
    """A tensor under way."""

    tag: int
    tensor: Tensor
    as_sent: Tensor
    """A copy made when the send began, and from then on what is under way."""


@dataclass(slots=True)
class Link:
    """All that crosses from one stage to the next, in order; nothing leaves before its receive is posted."""

    name: str
    sent: deque[_Sent] = field(default_factory=deque)
    arrived: deque[_Sent] = field(default_factory=deque)
    num_posted: int = 0
    """Receives whose tensor has not come."""

    @property
    def may_move(self) -> bool:
        return self.num_posted > 0 and bool(self.sent)

    def under_way(self) -> list[_Sent]:
        """What nobody has received."""
        return [*self.arrived, *self.sent]

    def move(self) -> None:
        """The oldest tensor leaves the sender's memory and reaches the receiver."""
        sent = self.sent.popleft()
        if not torch.equal(sent.tensor, sent.as_sent):
            raise WireError(f"plan {sent.tag}: {self.name}: the tensor was written to before its send was complete")
        self.num_posted -= 1
        self.arrived.append(sent)


class LocalNetwork:
    """The links between the stages of one group."""

    def __init__(self, interleaving: Interleaving) -> None:
        self._interleaving = interleaving
        self._links: dict[int, Link] = {}
        """By the stage that sends."""
        self._transports: list[LocalTransport] = []
        self.postings: list[Posting] = []
        """Every receive posted so far."""

    def transport(self, stage: int, stage_count: int, *, hidden_size: int, dtype: torch.dtype) -> Transport:
        """One stage's transport; to be used by a task of the interleaving only."""
        if stage_count == 1:
            return LoopbackTransport()
        before = (stage - 1) % stage_count
        width, received = (FEEDBACK_WIDTH, torch.int64) if stage == 0 else (hidden_size, dtype)
        transport = LocalTransport(
            cast(SocketSender, LocalSender(self._interleaving, self._link(stage, stage_count))),
            cast(SocketReceiver, LocalReceiver(self._interleaving, self._link(before, stage_count), width, received)),
            stage=stage,
            stage_count=stage_count,
            step_timeout_seconds=NO_TIMEOUT_SECONDS,
        )
        transport.watch(self.postings, self._link(before, stage_count), hidden_size)
        self._transports.append(transport)
        return transport

    def outstanding(self) -> list[str]:
        """Transfers of which one end is missing; a run may end before the last feedback is waited for."""
        sent = {f"plan {each.tag}: {link.name}" for link in self._links.values() for each in link.under_way()}
        expected = {name for transport in self._transports for name in transport.still_expected()}
        return sorted(sent ^ expected)

    def _link(self, source: int, stage_count: int) -> Link:
        if source not in self._links:
            channel = "feedback" if source == stage_count - 1 else "hidden"
            link = Link(f"{channel} from stage {source} to stage {(source + 1) % stage_count}")
            self._links[source] = link
            self._interleaving.add_event(link.name, lambda: link.may_move, link.move)
        return self._links[source]


class LocalTransport(SocketTransport):
    """Notes the receives that are posted."""

    def watch(self, postings: list[Posting], link: Link, hidden_size: int) -> None:
        """Note them in `postings` and on `link`."""
        self._postings, self._link, self._hidden_size = postings, link, hidden_size
        self._posted: set[int] = set()

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        self._note("hidden", seq, (num_tokens, self._hidden_size))
        super().post_hidden(seq, num_tokens)

    def post_feedback(self, seq: int, num_rows: int) -> None:
        self._note("feedback", seq, (num_rows, FEEDBACK_WIDTH))
        super().post_feedback(seq, num_rows)

    def still_expected(self) -> list[str]:
        """Receives that were posted and not waited for."""
        return [f"plan {seq}: {self._link.name}" for seq, _ in self._expected]

    def _note(self, channel: Channel, seq: int, shape: tuple[int, ...]) -> None:
        if seq in self._posted:
            raise WireError(f"plan {seq}: {self._link.name} is posted twice by its receiver")
        self._posted.add(seq)
        self._link.num_posted += 1
        stage = self._stage_before + 1 if channel == "hidden" else 0
        self._postings.append(Posting(stage=stage, channel=channel, seq=seq, shape=shape))


class LocalSender:
    """In the form of a `SocketSender`."""

    def __init__(self, interleaving: Interleaving, link: Link) -> None:
        self._interleaving = interleaving
        self._link = link

    def send(self, tensor: Tensor, tag: int) -> None:
        """Begin to send, after others had a chance to go first."""
        self._interleaving.give_way()
        self._link.sent.append(_Sent(tag, tensor, tensor.clone()))

    def outstanding(self) -> int:
        """Tensors that have not left."""
        return len(self._link.sent)

    def await_oldest(self, timeout_seconds: float) -> None:
        """Until the oldest has left; time does not pass, so `timeout_seconds` never run out."""
        assert timeout_seconds > 0
        oldest = self._link.sent[0]
        waits_for = f"plan {oldest.tag}, sends {self._link.name}"
        self._interleaving.wait_until(lambda: not self._link.sent or self._link.sent[0] is not oldest, waits_for)


class LocalReceiver:
    """In the form of a `SocketReceiver`."""

    def __init__(self, interleaving: Interleaving, link: Link, width: int, dtype: torch.dtype) -> None:
        self._interleaving = interleaving
        self._link = link
        self._width = width
        self._dtype = dtype
        self._received: dict[int, deque[Tensor]] = {}
        """What is still good, by the number of rows."""

    def has_come(self) -> bool:
        """Whether something of the next tensor is there."""
        return bool(self._link.sent or self._link.arrived)

    def receive(self, rows: int, tag: int) -> Tensor:
        """The next tensor, which must have this tag and shape."""
        link = self._link
        self._interleaving.wait_until(lambda: bool(link.arrived), f"plan {tag}, receives {link.name}")
        sent = link.arrived.popleft()
        what, expected = sent.as_sent, ((rows, self._width), self._dtype)
        if (tuple(what.shape), what.dtype) != expected or sent.tag != tag:
            raise WireError(
                f"{link.name}: plan {sent.tag}, {what.dtype} of shape {tuple(what.shape)} is sent, "
                f"plan {tag}, {self._dtype} of shape {(rows, self._width)} expected"
            )
        good = self._received.setdefault(rows, deque())
        if len(good) == RECEIVE_RING:
            good.popleft().fill_(NONSENSE)
        good.append(what)
        return what
