"""Which requests step together. Pure.

There are as many cohorts as stages; one plan carries decode rows of one cohort. A request joins the lightest one; when
ends leave them uneven, requests change over, so that no plan carries more than `ceil(running / cohorts)` decode rows
(an uneven pipeline waits for its largest cohort). Cohorts take turns; one with nothing to run is passed over.
"""

from collections.abc import Iterator

from stageline_runtime.engine.scheduling.request import Request


class Cohorts:
    """Members of every cohort. Invariant: a running request is in exactly one, the one it names."""

    def __init__(self, num_cohorts: int) -> None:
        self._members: list[list[Request]] = [[] for _ in range(num_cohorts)]
        self._next = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Members of each."""
        return tuple(map(len, self._members))

    def members(self, cohort: int) -> list[Request]:
        """The cohort's requests, the most senior first."""
        return sorted(self._members[cohort], key=lambda request: request.seniority)

    def lightest(self) -> int:
        """The first cohort with the fewest members."""
        return self._members.index(min(self._members, key=len))

    def join(self, request: Request, cohort: int) -> None:
        """Make `request` a member of `cohort`."""
        request.cohort = cohort
        self._members[cohort].append(request)

    def leave(self, request: Request) -> None:
        """End its membership."""
        self._members[request.cohort].remove(request)

    def even_out(self) -> None:
        """Move requests from the largest cohort to the smallest until their sizes differ by one at most.

        A request keeps its slot: a cohort is who runs together, a slot is where its cache lies.
        """
        while True:
            largest, smallest = max(self._members, key=len), min(self._members, key=len)
            if len(largest) - len(smallest) < 2:
                return
            request = largest.pop()
            request.out_of_turn = True
            self.join(request, self._members.index(smallest))

    def turns(self) -> Iterator[int]:
        """All cohorts, whose turn it is first."""
        for offset in range(len(self._members)):
            yield (self._next + offset) % len(self._members)

    def took_turn(self, cohort: int) -> None:
        """A plan of `cohort` was made; the one behind it is next."""
        self._next = (cohort + 1) % len(self._members)
