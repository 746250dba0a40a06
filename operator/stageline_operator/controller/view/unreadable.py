"""What can't be listed, per kind and namespace, because a right is missing or the API server fails.

A model that does not need it is reconciled as usual. A model that needs it is left unchanged, and its conditions
contain the API server's message.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import NODE, PIPELINE_MODEL, Place

FORBIDDEN: Final = (401, 403)


class Unreadable:
    """Reasons by kind and namespace. Belongs to one event loop."""

    def __init__(self) -> None:
        self._sentences: dict[tuple[str, str], str] = {}

    def note(self, place: Place, error: ApiError) -> str:
        """Record a failed list; returns the message if it is new."""
        key = (place.resource.kind, place.namespace)
        is_news = key not in self._sentences
        self._sentences[key] = explain(place, error)
        return self._sentences[key] if is_news else ""

    def clear(self, place: Place) -> bool:
        """Record a successful list; returns whether the place was unreadable before."""
        return self._sentences.pop((place.resource.kind, place.namespace), None) is not None

    def why(self, place: Place) -> str:
        """Why it can't be listed; empty if it can, or was not tried."""
        return self._sentences.get((place.resource.kind, place.namespace), "")

    def all(self) -> Mapping[tuple[str, str], str]:
        """Messages by kind and namespace."""
        return dict(self._sentences)

    def needed_for(self, namespace: str, kinds: Iterable[str]) -> str:
        """What prevents a reconcile of objects of these kinds in a namespace; empty if nothing does."""
        found = (self._sentences.get((kind, where)) for kind in kinds for where in (namespace, ""))
        return next((sentence for sentence in found if sentence is not None), "")


def explain(place: Place, error: ApiError) -> str:
    """Why a place can't be listed, and what to do."""
    resource = place.resource
    if error.is_not_found and resource is PIPELINE_MODEL:
        return "the CustomResourceDefinition of PipelineModels is not installed (`stageline crd` prints it)"
    if error.status not in FORBIDDEN:
        return f"{place} can't be listed: {error}"
    if resource is NODE:
        return "nodes may not be listed, so lost nodes will be derived from their pods"
    verbs = "list and watch" if resource.is_watched else "list"
    return f"the operator's role must allow to {verbs} {place}: {error}"
