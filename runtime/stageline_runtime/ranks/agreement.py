"""What ranks can't know alike from a plan, agreed on within one exchange: whether all of them have heard something.

Each rank says whether it has. All of them read the same answers and so conclude alike, whenever each of them heard; a
rank that has not heard makes all of them go on as if nobody had. Only for what is harmless either way.
"""

from typing import Final

import torch

from stageline_runtime.ranks.protocol import RankGroup

_SAID: Final = {flag: torch.tensor([flag], dtype=torch.uint8) for flag in (False, True)}


def have_all_heard(ranks: RankGroup, has_heard: bool, operation: str) -> bool:
    """Whether every rank has; `operation` names the exchange for the watchdog."""
    return bool(ranks.all_gather(_SAID[has_heard], operation).all())
