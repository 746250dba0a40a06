"""Which group takes a request: the ready one with the fewest requests outstanding. Pure but for the count it keeps.

Among equals the group that was given the fewest requests so far is taken, so idle groups take turns.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from stageline_api.endpoints import GroupEndpoint


@dataclass(frozen=True, slots=True)
class Share:
    """How much one group's engine has been given."""

    outstanding: int = 0
    started: int = 0


IDLE = Share()


def choose(
    groups: Iterable[GroupEndpoint], shares: Mapping[str, Share], excluded: Collection[str] = ()
) -> GroupEndpoint | None:
    """The ready group that is least loaded, leaving out the URLs in `excluded`; None when none is left."""

    def load(group: GroupEndpoint) -> tuple[int, int, int]:
        share = shares.get(group.url, IDLE)
        return share.outstanding, share.started, group.group

    candidates = [group for group in groups if group.ready and group.url not in excluded]
    return min(candidates, key=load, default=None)


def why_not_ready(model: str, groups: Iterable[GroupEndpoint]) -> str:
    """One sentence for a client or a probe: why none of `groups` can take a request."""
    reasons = [f"group {group.group}: {group.message or 'not ready'}" for group in groups if not group.ready]
    return f"No group of model '{model}' is ready ({'; '.join(reasons) or 'no group exists'})."


@dataclass(slots=True)
class Ledger:
    """Requests outstanding per engine URL. A URL belongs to one incarnation of one group."""

    shares: dict[str, Share] = field(default_factory=dict)

    @contextmanager
    def lease(self, url: str) -> Iterator[None]:
        """Count one request against `url` while the context lasts."""
        before = self.shares.get(url, IDLE)
        self.shares[url] = Share(before.outstanding + 1, before.started + 1)
        try:
            yield
        finally:
            now = self.shares[url]
            self.shares[url] = Share(now.outstanding - 1, now.started)

    def keep(self, urls: Collection[str]) -> None:
        """Forget engines that are gone, unless a request still runs on one."""
        self.shares = {url: share for url, share in self.shares.items() if url in urls or share.outstanding}
