"""Failed writes, object by object: reason, since when, and when to retry.

Kept only in memory, because a retry fails again. The wait grows with the time that a write has been failing, so that a
fleet without quota doesn't load the API server. A refusal is reported at once. A transient error, such as a webhook
timeout, is reported after `PASSING_SECONDS`.
"""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from stageline_api import labels
from stageline_api.failures import FailureClass
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.object_writes import NameTakenError, StaleError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.planner.objects.cache_claims import CLAIM
from stageline_operator.planner.types import PodRefusal, kind_of

PASSING_SECONDS: Final = 15.0
_SHORTEST_WAIT_SECONDS: Final = 2.0
_SHORTEST_PASSING_WAIT_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 30.0
_QUOTA_WORDS: Final = "exceeded quota"
"""The quota admission's message; its response has no field for it."""
_RESIZE_WORDS: Final = "must support resize"
"""The admission's message for a claim whose storage class does not allow expansion."""
_UNPROCESSABLE: Final = 422

Slot = tuple[str, ...]
"""Key of a write: kind and name, or for a pod its group and stage, so that the key outlives the incarnation."""
PASS: Final[Slot] = ("pass",)
"""Key for failures of a pass other than object writes."""
WriteError = ApiError | NameTakenError | StaleError


@dataclass(frozen=True)
class Refusal:
    """One failed write. `name` is the object's."""

    name: str
    message: str
    since: datetime
    retry_at: datetime
    is_passing: bool = False
    is_unchangeable: bool = False
    """Whether it is about an existing claim that can't be changed as wanted."""

    def should_report(self, now: datetime) -> bool:
        return not self.is_passing or now - self.since >= timedelta(seconds=PASSING_SECONDS)

    def next_look(self, now: datetime) -> float:
        """Seconds until its retry or its report."""
        moments = [self.retry_at]
        if not self.should_report(now):
            moments.append(self.since + timedelta(seconds=PASSING_SECONDS))
        return max(0.0, (min(moments) - now).total_seconds())


class Refusals:
    """Failed writes by model and key. Belongs to one event loop."""

    def __init__(self) -> None:
        self._of: dict[ModelKey, dict[Slot, Refusal]] = {}

    def note(self, key: ModelKey, slot: Slot, name: str, error: WriteError, now: datetime, words: str = "") -> Refusal:
        """Record a failed write, first or repeated. `words` replace the error's message."""
        before = self._of.get(key, {}).get(slot)
        since = now if before is None else before.since
        is_passing = not (words or is_refusal(error))
        shortest = _SHORTEST_PASSING_WAIT_SECONDS if is_passing else _SHORTEST_WAIT_SECONDS
        seconds = min(_LONGEST_WAIT_SECONDS, max(shortest, (now - since).total_seconds()))
        asked = error.retry_after_seconds if isinstance(error, ApiError) else None
        # Jittered, so that writes that wait for the same quota are not retried at the same time.
        retry_at = now + timedelta(seconds=max(asked or 0.0, seconds * random.uniform(0.5, 1.0)))
        is_unchangeable = slot[0] == CLAIM and _is_unchangeable(error)
        refusal = Refusal(name, words or str(error), since, retry_at, is_passing, is_unchangeable)
        self._of.setdefault(key, {})[slot] = refusal
        return refusal

    def made(self, key: ModelKey, slot: Slot) -> None:
        """The write succeeded, or is no longer needed."""
        self._of.get(key, {}).pop(slot, None)

    def knows(self, key: ModelKey, slot: Slot) -> bool:
        return slot in self._of.get(key, {})

    def waits(self, key: ModelKey, slot: Slot, now: datetime) -> bool:
        """Whether it is too early to retry."""
        known = self._of.get(key, {}).get(slot)
        return known is not None and now < known.retry_at

    def pods(self, key: ModelKey, now: datetime) -> Mapping[str, PodRefusal]:
        """Refusals of pods to report, by name."""
        reported = [each for slot, each in self._of.get(key, {}).items() if is_pod(slot) and each.should_report(now)]
        return {each.name: PodRefusal(_class_of(each), each.message, each.since, each.retry_at) for each in reported}

    def sentence(self, key: ModelKey, now: datetime) -> str:
        """The report on all other failures; among several the one that has lasted longest."""
        reported = [
            each for slot, each in self._of.get(key, {}).items() if not is_pod(slot) and each.should_report(now)
        ]
        return min(reported, key=lambda each: each.since).message if reported else ""

    def unchangeable(self, key: ModelKey) -> frozenset[tuple[str, str]]:
        """Kind and name of claims that can't be changed as wanted."""
        known = self._of.get(key, {}).items()
        return frozenset((slot[0], each.name) for slot, each in known if each.is_unchangeable)

    def next_look(self, key: ModelKey, wanted: Collection[Slot], now: datetime) -> float | None:
        """Seconds until the next retry or report of a wanted object."""
        waits = [each.next_look(now) for slot, each in self._of.get(key, {}).items() if slot in wanted]
        return min(waits, default=None)

    def keep(self, key: ModelKey, wanted: Collection[Slot], groups: Collection[str]) -> None:
        """Drop refusals of pods of other groups, and of all objects that are no longer wanted."""
        known = self._of.get(key, {})
        for slot in list(known):
            if (slot[1] not in groups) if is_pod(slot) else (slot not in wanted and slot != PASS):
                del known[slot]

    def retry_pods(self, key: ModelKey, now: datetime) -> None:
        """Retry pods at once: the wanted pods have new names."""
        known = self._of.get(key, {})
        for slot in known:
            if is_pod(slot):
                before = known[slot]
                known[slot] = Refusal("", before.message, before.since, now, before.is_passing)

    def forget(self, key: ModelKey) -> None:
        """Drop the state of a deleted model."""
        self._of.pop(key, None)


def slot_of(manifest: Mapping[str, Any]) -> Slot:
    kind = kind_of(manifest)
    if kind == "Pod":
        own = manifest["metadata"]["labels"]
        return kind, str(own[labels.GROUP]), str(own[labels.STAGE])
    return kind, str(manifest["metadata"]["name"])


def is_pod(slot: Slot) -> bool:
    return slot[0] == "Pod"


def is_refusal(error: WriteError) -> bool:
    """Whether the same request fails until a user changes a quota, a policy, a right or an object."""
    if not isinstance(error, ApiError):
        return isinstance(error, NameTakenError)
    return not (error.is_passing or error.is_conflict or error.is_not_found or error.is_namespace_ending)


def _is_unchangeable(error: WriteError) -> bool:
    return isinstance(error, ApiError) and (error.status == _UNPROCESSABLE or _RESIZE_WORDS in str(error))


def _class_of(refusal: Refusal) -> FailureClass:
    return FailureClass.QUOTA_EXCEEDED if _QUOTA_WORDS in refusal.message else FailureClass.POD_REFUSED
