"""Kinds that this operator's role doesn't let it list, as after an upgrade of the image without the chart's newer role.

A model that needs none of them is looked after as ever. One that does is left exactly as it is, and its conditions say
which right is missing, in the API server's words.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import Resource
from stageline_operator.planner.types import kind_of

FORBIDDEN: Final = (401, 403)


class MissingRights:
    """By kind. Belongs to one event loop."""

    def __init__(self) -> None:
        self._sentences: dict[str, str] = {}

    def note(self, resource: Resource, error: ApiError) -> bool:
        """Whether it was a right that a request for `resource` failed for."""
        if error.status not in FORBIDDEN:
            return False
        verbs = "list and watch" if resource.is_watched else "list"
        where = resource.plural + (f".{resource.group}" if resource.group else "")
        self._sentences[resource.kind] = f"the operator's role must allow to {verbs} {where}: {error}"
        return True

    def granted(self, resource: Resource) -> None:
        """It can be listed by now."""
        self._sentences.pop(resource.kind, None)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(self._sentences)

    def needed_for(self, manifests: Iterable[Mapping[str, Any]]) -> str:
        """Which right is missing to look after objects like these; empty when none is."""
        return next((self._sentences[kind] for each in manifests if (kind := kind_of(each)) in self._sentences), "")
