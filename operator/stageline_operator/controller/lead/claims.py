"""Which operator a model belongs to, where several installations of Stageline see it.

Replicas of one installation compete for one Lease. Two installations have two, so both would act on the same models,
under one field manager and without ever seeing a conflict. So each writes the name of its Lease into the status of
every model it acts on, over exactly the version it has seen: of two that begin at once one is first. A model that names
another Lease is left alone while that one is renewed by a holder that serves the model's namespace. A minute after the
last sign of life the model may be taken, or when two looks have found no Lease: a holder that lives makes a deleted one
again within its retries. Whoever may not read the other Lease never takes it.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from stageline_api.resource.life.status import PipelineModelStatus
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import LEASE, ModelKey
from stageline_operator.controller.lead.leader import SeenLease, see, served_namespaces
from stageline_operator.controller.settings import LeaseName

ABANDONED_SECONDS: Final = 60.0
"""How long a Lease must not have been renewed. Longer than any rollout of an operator takes."""
AGAIN_SECONDS: Final = 15.0
"""When to ask again about a model of another's."""
TELL_AGAIN_SECONDS: Final = 300.0
"""When to say again that a model waits for a person: its Events lapse."""
_LOOK_SECONDS: Final = 5.0
"""How old what was seen of a Lease may be: many models may name the same one. Longer than a holder's retries."""
_LOOKS_IN_VAIN: Final = 2
"""As many in a row, and a Lease is gone."""
_FORBIDDEN: Final = (401, 403)

_log = logging.getLogger(__name__)


class Claims:
    """`own` None: an operator that has no Lease acts without asking, and claims nothing."""

    def __init__(self, api: KubeApi, own: LeaseName | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self.own = "" if own is None else f"{own.namespace}/{own.name}"
        self._seen: dict[str, SeenLease] = {}
        """The version of each other Lease and when it was first seen."""
        self._missed: dict[str, int] = {}
        """How many looks in a row found no such Lease."""
        self._unreadable: set[str] = set()
        self._looked_at: dict[str, float] = {}

    async def is_anothers(self, claimed: str, namespace: str) -> bool:
        """Whether a model of this namespace with this claim is to be left alone. Raises `ApiError`."""
        if claimed in ("", self.own) or not self.own:
            return False
        now = self._clock()
        if now - self._looked_at.get(claimed, now - _LOOK_SECONDS) >= _LOOK_SECONDS:
            await self._look(claimed)
            self._looked_at[claimed] = now
        if claimed in self._unreadable:
            return True
        if claimed in self._missed:
            return self._missed[claimed] < _LOOKS_IN_VAIN
        seen = self._seen[claimed]
        served = served_namespaces(seen.manifest)
        is_served = not served or namespace in served
        return is_served and self._clock() - seen.seen_at <= ABANDONED_SECONDS

    def claimed(self, status: PipelineModelStatus) -> PipelineModelStatus:
        """With this operator's name, which is none without a Lease: another's would name who doesn't act on it."""
        return status.model_copy(update={"operator": self.own})

    def is_unreadable(self, claimed: str) -> bool:
        """Whether the last look at this Lease was refused: its models are left alone until somebody hands them over."""
        return claimed in self._unreadable

    async def _look(self, claimed: str) -> None:
        namespace, _, name = claimed.partition("/")
        try:
            manifest = await self._api.get(LEASE, namespace, name)
        except ApiError as error:
            if error.is_not_found:
                self._unreadable.discard(claimed)
                self._seen.pop(claimed, None)
                self._missed[claimed] = self._missed.get(claimed, 0) + 1
            elif error.status in _FORBIDDEN:
                if claimed not in self._unreadable:
                    _log.warning("models of %s are left alone for good: its Lease can't be read: %s", claimed, error)
                self._missed.pop(claimed, None)
                self._unreadable.add(claimed)
            else:
                raise
            return
        self._unreadable.discard(claimed)
        self._missed.pop(claimed, None)
        self._seen[claimed] = see(manifest, self._seen.get(claimed), self._clock())


class LeftAlone:
    """Which models were left to whom, as Events have said."""

    def __init__(self) -> None:
        self._told: dict[ModelKey, tuple[str, float]] = {}
        """The Lease that was named, and when."""

    def is_to_be_told(self, key: ModelKey, holder: str, now: float, *, again: bool) -> bool:
        """Once for each holder; `again` and again where only a person can change it."""
        known, at = self._told.get(key, ("", now))
        if known == holder and not (again and now - at >= TELL_AGAIN_SECONDS):
            return False
        self._told[key] = (holder, now)
        return True

    def forget(self, key: ModelKey) -> None:
        self._told.pop(key, None)


def left_alone_words(key: ModelKey, own: str, holder: str, *, is_unreadable: bool) -> str:
    """What an Event says of a model that is left to the operator of the Lease `holder`."""
    words = f"the operator of Lease {own} leaves this model to that of Lease {holder}"
    if not is_unreadable:
        return words
    patch = f"kubectl -n {key.namespace} patch plm {key.name} --subresource=status --type=merge"
    return f"""{words}, which it may not read; to hand it over: {patch} -p '{{"status":{{"operator":""}}}}'"""
