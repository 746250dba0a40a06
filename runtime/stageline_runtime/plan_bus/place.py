"""Where a process stands in its group: the stage, and the rank within it."""

from typing import NamedTuple


class Place(NamedTuple):
    stage: int
    rank: int = 0

    def words(self, ranks: int) -> str:
        """As people are told: the rank only where a stage has several."""
        return f"stage {self.stage}" if ranks == 1 else f"stage {self.stage}, rank {self.rank}"
