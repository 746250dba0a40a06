"""Pods that the API server did not let be made, for the planner: who, why, and when to try again.

Kept in memory alone, since trying again tells the same. The wait grows with the time that a pod has been refused for,
so that a fleet without quota doesn't spend the API server's time on being refused.
"""

import random
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from stageline_api.failures import FailureClass
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.planner.types import PodRefusal

_SHORTEST_WAIT_SECONDS: Final = 2.0
_LONGEST_WAIT_SECONDS: Final = 30.0
_QUOTA_WORDS: Final = "exceeded quota"
"""What the API server's quota admission says; its answer has no field for it."""


class PodRefusals:
    """The refusals of each model's pods. Belongs to one event loop."""

    def __init__(self) -> None:
        self._of: dict[ModelKey, dict[str, PodRefusal]] = {}

    def of_model(self, key: ModelKey) -> Mapping[str, PodRefusal]:
        """Refusals by pod name."""
        return dict(self._of.get(key, {}))

    def note(self, key: ModelKey, pod: str, error: ApiError, now: datetime) -> None:
        """The pod was refused, again perhaps."""
        before = self._of.get(key, {}).get(pod)
        since = now if before is None else before.since
        failure_class = FailureClass.QUOTA_EXCEEDED if _QUOTA_WORDS in str(error) else FailureClass.POD_REFUSED
        seconds = min(_LONGEST_WAIT_SECONDS, max(_SHORTEST_WAIT_SECONDS, (now - since).total_seconds()))
        # Spread, so that those who wait for the same quota don't come at once.
        retry_at = now + timedelta(seconds=seconds * random.uniform(0.5, 1.0))
        self._of.setdefault(key, {})[pod] = PodRefusal(failure_class, str(error), since, retry_at)

    def made(self, key: ModelKey, pod: str) -> None:
        """The pod exists by now."""
        self._of.get(key, {}).pop(pod, None)

    def forget(self, key: ModelKey) -> None:
        """The model is gone, or begins anew with pods of other names."""
        self._of.pop(key, None)


def is_refusal(error: ApiError) -> bool:
    """Whether the same request will be refused until somebody changes a quota, a policy or a right."""
    return not (error.is_passing or error.is_conflict or error.is_not_found or error.is_namespace_ending)
