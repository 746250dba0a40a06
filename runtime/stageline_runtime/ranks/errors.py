"""Why an exchange between the ranks of a stage ends without a result."""


class RanksEndedError(Exception):
    """Another rank of the stage has ended, so what this one waits for will not come."""

    def __init__(self, operation: str, reason: str = "another rank of the stage has ended") -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation = operation


class RankMismatchError(Exception):
    """Two ranks don't make the same exchange: a fault in the program, since all of them run the same plans."""

    def __init__(self, rank: int, own: str, other_rank: int, other: str) -> None:
        super().__init__(f"rank {rank} is at {own}, rank {other_rank} at {other}")
        self.rank = rank
        self.other_rank = other_rank
