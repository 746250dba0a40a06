"""What can't be listed: each kind in each namespace by itself, for want of a right or because the API server fails.

A model that needs none of it is looked after as ever. One that does is left exactly as it is, and its conditions say
what is missing, in the API server's words.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import NODE, PIPELINE_MODEL, Place

FORBIDDEN: Final = (401, 403)


class Unreadable:
    """By kind and namespace. Belongs to one event loop."""

    def __init__(self) -> None:
        self._sentences: dict[tuple[str, str], str] = {}

    def note(self, place: Place, error: ApiError) -> str:
        """It can't be listed; returns the sentence when that is news."""
        key = (place.resource.kind, place.namespace)
        is_news = key not in self._sentences
        self._sentences[key] = explain(place, error)
        return self._sentences[key] if is_news else ""

    def clear(self, place: Place) -> bool:
        """It was listed; returns whether that is news."""
        return self._sentences.pop((place.resource.kind, place.namespace), None) is not None

    def why(self, place: Place) -> str:
        """Why it can't be listed; empty when it can, or when nobody has tried."""
        return self._sentences.get((place.resource.kind, place.namespace), "")

    def all(self) -> Mapping[tuple[str, str], str]:
        """Sentences by kind and namespace."""
        return dict(self._sentences)

    def needed_for(self, namespace: str, kinds: Iterable[str]) -> str:
        """What is missing to look after objects of these kinds in a namespace; empty when nothing is."""
        found = (self._sentences.get((kind, where)) for kind in kinds for where in (namespace, ""))
        return next((sentence for sentence in found if sentence is not None), "")


def explain(place: Place, error: ApiError) -> str:
    """Why a place can't be listed, and what to do about it."""
    resource = place.resource
    if error.is_not_found and resource is PIPELINE_MODEL:
        return "the CustomResourceDefinition of PipelineModels is not installed (`stageline crd` prints it)"
    if error.status not in FORBIDDEN:
        return f"{place} can't be listed: {error}"
    if resource is NODE:
        return "nodes may not be listed, so a lost node will be told from its pods"
    verbs = "list and watch" if resource.is_watched else "list"
    return f"the operator's role must allow to {verbs} {place}: {error}"
