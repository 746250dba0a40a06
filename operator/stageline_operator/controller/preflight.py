"""Waits, before anything is watched, until the CRD is installed and every needed resource can be listed."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import NODE, PIPELINE_MODEL, WATCHED, Resource

_RETRY_SECONDS: Final = 3.0
_FORBIDDEN: Final = (401, 403)

_log = logging.getLogger(__name__)


async def watchable_resources(api: KubeApi, namespaces: Sequence[str]) -> tuple[Resource, ...]:
    """Wait until everything needed can be listed; nodes are left out when this operator may not see them."""
    allowed: list[Resource] = []
    for resource in WATCHED:
        if await _wait_until_listable(api, resource, namespaces if resource.namespaced else ("",)):
            allowed.append(resource)
    return tuple(allowed)


async def _wait_until_listable(api: KubeApi, resource: Resource, namespaces: Sequence[str]) -> bool:
    said = ""
    while True:
        try:
            for namespace in namespaces or ("",):
                await api.list(resource, namespace, resource.selector, limit=1)
            return True
        except ApiError as error:
            if resource is NODE and error.status in _FORBIDDEN:
                _log.warning("nodes may not be listed: a lost node will be told from its pods")
                return False
            sentence = _explain(resource, error)
        if sentence != said:
            _log.warning("waiting: %s", sentence)
            said = sentence
        await asyncio.sleep(_RETRY_SECONDS)


def _explain(resource: Resource, error: ApiError) -> str:
    if error.is_not_found and resource is PIPELINE_MODEL:
        return "the CustomResourceDefinition of PipelineModels is not installed (`stageline crd` prints it)"
    if error.status in _FORBIDDEN:
        return f"this operator's role must allow list and watch of {resource.plural}: {error}"
    return str(error)
