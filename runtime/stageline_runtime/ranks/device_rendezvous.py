"""How the ranks of a stage that have a device each find each other, and test their exchanges.

They meet in a file. Their supervisor has made its directory, which no other user may enter: no socket listens, so no
outsider can send messages as a rank. Each rank registers there, so that a missing one is named. Then they open a
communicator, and each kind of exchange runs once before the first plan.
"""

import time
from datetime import timedelta
from typing import Final

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore

from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.ranks.device_ranks import DeviceRanks, RankBackend
from stageline_runtime.ranks.errors import RanksEndedError
from stageline_runtime.ranks.rank_area import RankArea
from stageline_runtime.termination import RuntimeFailure

JOIN: Final = "join the ranks"
_POLL_SECONDS: Final = 0.02


class RankMeeting:
    """The file `path` in which the ranks of `stage` meet, as rank `rank` sees it; `area` is their supervisor's."""

    def __init__(self, path: str, area: RankArea, *, stage: int, rank: int, timeout_seconds: float) -> None:
        """`timeout_seconds` is how long what asks the store may wait for an answer that only others can give."""
        self.area = area
        self.rank = rank
        self.place = f"stage {stage}, rank {rank}"
        self.store = FileStore(path, area.size)
        self.store.set_timeout(timedelta(seconds=timeout_seconds))

    def meet(self, purpose: str, timeout_seconds: float, failure_class: FailureClass) -> None:
        """Wait until all ranks have come here for `purpose`, which serves once.

        Raises:
            RuntimeFailure: of `failure_class`, naming the ranks that did not come in time.
            RanksEndedError: one of them has ended.
        """
        self.store.set(f"{purpose}/{self.rank}", "here")
        deadline = time.monotonic() + timeout_seconds
        while missing := [rank for rank in range(self.area.size) if not self.store.check([f"{purpose}/{rank}"])]:
            if self.area.is_ended:
                raise RanksEndedError(purpose)
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                detail = f"{self.place} waited for rank {names} to {purpose} for {timeout_seconds:g} s"
                raise RuntimeFailure(failure_class, detail, operation=purpose, rank=missing[0])
            time.sleep(_POLL_SECONDS)


def join_device_ranks(
    meeting: RankMeeting,
    backend: RankBackend,
    accelerator: Accelerator,
    *,
    timeout_seconds: float,
    step_timeout_seconds: float,
) -> DeviceRanks:
    """Open the communicator once all ranks are there, and try it out.

    Raises:
        RuntimeFailure: class RendezvousTimeout when not all ranks came in time, PeerLost when there is no communicator.
        RanksEndedError: another rank has ended.
    """
    meeting.meet(JOIN, timeout_seconds, FailureClass.RENDEZVOUS_TIMEOUT)
    rank, size = meeting.rank, meeting.area.size
    # Its own limit comes last: the watchdog has said by then which exchange it was.
    own_limit = 2 * max(timeout_seconds, step_timeout_seconds)
    try:
        group = backend.open(PrefixStore("exchanges", meeting.store), rank, size, accelerator.device, own_limit)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        is_late = any(words in reason.lower() for words in ("timeout", "timed out"))  # torch has no class for it
        failure_class = FailureClass.RENDEZVOUS_TIMEOUT if is_late else FailureClass.PEER_LOST
        detail = f"{meeting.place} can't exchange by {backend.name}: {reason}"
        raise RuntimeFailure(failure_class, detail, operation=JOIN) from error
    ranks = DeviceRanks(group, backend, accelerator, meeting.area, rank)
    _try_out(ranks, meeting, accelerator, timeout_seconds)
    return ranks


def _try_out(ranks: DeviceRanks, meeting: RankMeeting, accelerator: Accelerator, timeout_seconds: float) -> None:
    """Each kind of exchange once: what a first use makes, no plan has to wait for."""
    one = torch.ones(1, device=accelerator.device)
    results = (
        ranks.all_reduce(one.clone(), "first all-reduce"),
        ranks.all_gather(one, "first all-gather").sum(0),
        ranks.reduce_scatter(one.expand(ranks.size, 1), "first reduce-scatter"),
    )
    done = accelerator.main.record()
    deadline = time.monotonic() + timeout_seconds
    while not done.is_done():
        ranks.check()
        if time.monotonic() > deadline:
            unfinished = ranks.unfinished()
            late = () if unfinished is None else unfinished.late
            detail = f"{meeting.place}: no first exchange with the other ranks within {timeout_seconds:g} s"
            raise RuntimeFailure(
                FailureClass.RENDEZVOUS_TIMEOUT, detail, operation=JOIN, rank=late[0] if late else None
            )
        time.sleep(_POLL_SECONDS)
    ranks.check()
    if any(result.tolist() != [float(ranks.size)] for result in results):
        detail = (
            f"{meeting.place}: first sums of ones over {ranks.size} ranks are {[each.tolist() for each in results]}"
        )
        raise RuntimeFailure(FailureClass.INTERNAL, detail, operation=JOIN)
