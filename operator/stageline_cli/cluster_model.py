"""One PipelineModel of a cluster for commands: its spec, its revisions, and waiting for a rollout.

Changes are based on the version that was read (`resourceVersion`), so that concurrent changes are never lost. Waiting
ends when the model is Ready at the requested generation, when it stalls, or after the timeout; it changes nothing.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from stageline_api import labels
from stageline_api.conditions import ConditionType
from stageline_api.errors import UserError
from stageline_api.resource.life.recorded_status import read_status
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.reader import ApiServer
from stageline_operator.planner.observed.observed_objects import revision_specs

_LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Revision:
    """A revision that the cluster still knows, with its spec."""

    name: str
    created: str
    spec: Mapping[str, Any]
    groups: int


class ClusterModel:
    """All methods raise `UserError` with the API server's message."""

    def __init__(self, api: ApiServer, namespace: str, name: str) -> None:
        self._api = api
        self.namespace, self.name = namespace, name
        place = f"namespaces/{quote(namespace, safe='')}/pipelinemodels/{quote(name, safe='')}"
        self._path = f"/apis/stageline.dev/v1alpha1/{place}"

    def read(self) -> dict[str, Any]:
        """The manifest."""
        try:
            return self._api.get_json(self._path)
        except ApiError as error:
            if error.is_not_found:
                where = f"cluster {self._api.context}, namespace {self.namespace}"
                raise UserError(f"{where}: there is no PipelineModel {self.name!r}") from error
            raise UserError(f"PipelineModel {self.name!r} can't be read: {error}") from error

    def change(self, manifest: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the spec of `manifest` by `spec`; returns the new manifest."""
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": manifest["metadata"]["resourceVersion"]},
            {"op": "replace", "path": "/spec", "value": spec},
        ]
        try:
            return self._api.patch_json(self._path, patch)
        except ApiError as error:
            raise UserError(f"PipelineModel {self.name!r} can't be changed: {error}") from error

    def revisions(self, status: PipelineModelStatus) -> list[Revision]:
        """The revisions of existing groups and the current one, the newest first."""
        try:
            path, selector = f"/api/v1/namespaces/{self.namespace}/configmaps", f"{labels.MODEL}={self.name}"
            found = self._api.get_json(path, labelSelector=selector)["items"]
        except ApiError as error:
            raise UserError(f"revisions of {self.name!r} can't be read: {error}") from error
        specs = revision_specs(found)
        created = {each["metadata"].get("labels", {}).get(labels.REVISION): each["metadata"] for each in found}
        groups = Counter(group.revision for group in status.groups)
        revisions = [
            Revision(name, created[name]["creationTimestamp"], spec, groups[name]) for name, spec in specs.items()
        ]
        return sorted(revisions, key=lambda each: each.created, reverse=True)

    def wait_ready(self, generation: int, timeout_seconds: float, say: Callable[[str], None]) -> None:
        """Wait until the operator has rolled out that generation of the spec; reports each new state."""
        deadline = time.monotonic() + timeout_seconds
        said = ""
        while True:
            status = read_status(self.read().get("status"))
            words, is_over = _progress(status, generation)
            if words != said:
                say(words)
                said = words
            if is_over:
                return
            if time.monotonic() > deadline:
                raise UserError(f"not Ready within {timeout_seconds:g} s; the rollout continues: {words}")
            time.sleep(_LOOK_SECONDS)


def _progress(status: PipelineModelStatus, generation: int) -> tuple[str, bool]:
    """The state as a sentence, and whether the rollout is complete; raises `UserError` if it stalls."""
    if (status.observed_generation or 0) < generation:
        return "waiting for the operator", False
    conditions = {each.type: each for each in status.conditions}
    stalled, ready = conditions.get(ConditionType.STALLED), conditions.get(ConditionType.READY)
    if stalled is not None and stalled.status == "True":
        raise UserError(f"{stalled.reason}: {stalled.message}")
    if ready is None:
        return "waiting for the operator", False
    return f"{ready.reason}: {ready.message}", ready.status == "True"
