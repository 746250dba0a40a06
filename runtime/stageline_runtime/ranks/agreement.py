"""What ranks exchange beside the compute: whether all of them have heard something, and that all of them are there.

What they can't know alike from a plan is agreed on within one exchange. Each rank says whether it has heard. All of
them read the same answers and so conclude alike, whenever each of them heard; a rank that has not heard makes all of
them go on as if nobody had. Only for what is harmless either way.

Ranks that wait for work exchange nothing, so one that stands still would be missed by the next request alone. They meet
in each heartbeat, where the others' watchdogs know which rank has not come.
"""

from typing import Final

import torch

from stageline_runtime.ranks.protocol import RankGroup

MEET: Final = "all-reduce, heartbeat"

_SAID: Final = {flag: torch.tensor([flag], dtype=torch.uint8) for flag in (False, True)}


def have_all_heard(ranks: RankGroup, has_heard: bool, operation: str) -> bool:
    """Whether every rank has; `operation` names the exchange for the watchdog."""
    return bool(ranks.all_gather(_SAID[has_heard], operation).all())


def meet(ranks: RankGroup, device: torch.device) -> None:
    """Exchange that this rank is there; on a `device`, queued behind its work."""
    ranks.all_reduce(torch.zeros(1, device=device), MEET)
