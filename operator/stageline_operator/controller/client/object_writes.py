"""Writes guarded by ownership, uid and resourceVersion, so that repeating them is safe.

Objects are applied server-side under one field manager. Pods and Secrets are created and never patched. A deletion
names the uid of its object. A status is written only over the version that it was computed from.
"""

from collections.abc import Mapping
from typing import Any, Final

from stageline_api.resource import pipeline_model
from stageline_kubernetes.client import APPLY, JSON_PATCH, KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import PIPELINE_MODEL, RESOURCE_OF_KIND, Resource, controller_of
from stageline_operator.controller.settings import FIELD_MANAGER
from stageline_operator.planner.types import kind_of

_CREATED_ONLY: Final = frozenset({"Pod", "Secret"})
_UNPROCESSABLE: Final = 422
_OVERTAKEN: Final = "Conflict"
"""The reason when another writer used the namespace's quota at the same time; an existing object is `AlreadyExists`."""
_MANAGED: Final = {"fieldManager": FIELD_MANAGER}


class StaleError(Exception):
    """The write was based on an outdated version: observe again."""


class NameTakenError(Exception):
    """An object with the needed name exists and belongs to another owner."""


async def write_status(api: KubeApi, model: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
    """Write `status` over exactly the version `model`; returns the new version.

    Raises:
        StaleError: the model has another version, or is gone.
        ApiError: any other failure.
    """
    metadata = model["metadata"]
    version = metadata["resourceVersion"]
    patch = [
        {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "add", "path": "/status", "value": status},
    ]
    path = PIPELINE_MODEL.path(metadata["namespace"], metadata["name"], "status")
    try:
        return await api.patch(PIPELINE_MODEL, path, patch, JSON_PATCH, _MANAGED)
    except ApiError as error:
        if error.is_not_found or error.is_conflict:
            raise StaleError(str(error)) from error
        if error.status != _UNPROCESSABLE:
            raise
        # The API server sends the same error for a failed test and for an invalid status; the version tells them apart.
        current = await _live(api, PIPELINE_MODEL, metadata["namespace"], metadata["name"])
        if current is None or current["metadata"]["resourceVersion"] != version:
            raise StaleError(str(error)) from error
        raise


async def put_object(api: KubeApi, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Create or apply one object; None if it exists already and its kind is never patched.

    Raises:
        NameTakenError: an object of this name belongs to another owner.
        StaleError: a concurrent write prevented it; try again.
        ApiError: any other failure.
    """
    resource = RESOURCE_OF_KIND[kind_of(manifest)]
    if resource.kind in _CREATED_ONLY:
        try:
            return await api.create(resource, manifest, _MANAGED)
        except ApiError as error:
            if error.is_conflict and error.reason == _OVERTAKEN:
                raise StaleError(str(error)) from error
            if error.is_conflict:
                return None
            raise
    metadata = manifest["metadata"]
    path = resource.path(metadata["namespace"], metadata["name"])
    try:
        # Not forced at first: that would silently take over a user's object of the same name.
        return await api.patch(resource, path, manifest, APPLY, _MANAGED)
    except ApiError as error:
        if not error.is_conflict:
            raise
    live = await _live(api, resource, metadata["namespace"], metadata["name"])
    if live is not None and not is_owned_alike(live, manifest):
        raise NameTakenError(f"{resource.kind} {metadata['name']} exists and does not belong to this PipelineModel")
    return await api.patch(resource, path, manifest, APPLY, _MANAGED | {"force": "true"})


async def delete_object(
    api: KubeApi, kind: str, observed: Mapping[str, Any], grace_seconds: float | None
) -> dict[str, Any] | None:
    """Delete exactly the observed object; returns it while it is ending, None if it is gone.

    Raises:
        StaleError: the name belongs to a newer object.
        ApiError: any other failure.
    """
    metadata = observed["metadata"]
    options: dict[str, Any] = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
    if grace_seconds is not None:
        options["gracePeriodSeconds"] = int(grace_seconds)
    try:
        answer = await api.delete(RESOURCE_OF_KIND[kind], metadata["namespace"], metadata["name"], options)
    except ApiError as error:
        if error.is_not_found:
            return None
        if error.is_conflict:
            raise StaleError(str(error)) from error
        raise
    return answer if answer.get("metadata", {}).get("deletionTimestamp") else None


def is_owned_alike(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    """Whether both objects' controller is a PipelineModel of the same name (perhaps with another uid)."""
    theirs, ours = controller_of(live), controller_of(manifest)
    if theirs is None or ours is None:
        return False
    return theirs.get("kind") == ours.get("kind") == pipeline_model.KIND and theirs.get("name") == ours.get("name")


async def _live(api: KubeApi, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
    try:
        return await api.get(resource, namespace, name)
    except ApiError as error:
        if error.is_not_found:
            return None
        raise
