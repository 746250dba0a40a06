"""What a rank process has from its supervisor: descriptors, named by the environment."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from stageline_api import env
from stageline_runtime.ranks.rank_area import RankArea


@dataclass(frozen=True, slots=True)
class InheritedRank:
    area: RankArea
    rank: int
    store: str
    """Path of the file in which ranks on devices meet."""
    health: socket.socket
    """Listens for the supervisor's questions."""

    @classmethod
    def read(cls, rank: int, environ: Mapping[str, str] = os.environ) -> "InheritedRank":
        """Take over the descriptors; raises KeyError, ValueError or OSError when a supervisor didn't make them."""
        area = int(environ[env.RANK_AREA])
        inherited = cls(
            RankArea(area), rank, environ[env.RANK_STORE], socket.socket(fileno=int(environ[env.RANK_HEALTH]))
        )
        os.close(area)
        return inherited

    def late_ranks(self) -> tuple[int, ...]:
        """The ranks that have not reached the exchange that this one is at."""
        return self.area.late_ranks(self.rank)
