"""Waits, before anything is watched, until the CRD is installed and PipelineModels and their pods can be listed.

Every other kind that this operator may not list is left out, and noted for the models that need it: an operator that is
newer than its role goes on with all others. Once the right is granted, watching begins anew with that kind.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import NODE, PIPELINE_MODEL, POD, WATCHED, Resource
from stageline_operator.controller.view.missing_rights import FORBIDDEN, MissingRights

_RETRY_SECONDS: Final = 3.0
_ASK_AGAIN_SECONDS: Final = 30.0

_log = logging.getLogger(__name__)


class RightsGrantedError(Exception):
    """What could not be listed can be by now."""


async def watchable_resources(
    api: KubeApi, namespaces: Sequence[str], missing_rights: MissingRights
) -> tuple[Resource, ...]:
    """Wait until everything needed can be listed; what this operator may not see is left out."""
    allowed: list[Resource] = []
    for resource in WATCHED:
        if await _wait_until_listable(api, resource, namespaces if resource.namespaced else ("",), missing_rights):
            allowed.append(resource)
    return tuple(allowed)


async def until_granted(api: KubeApi, namespaces: Sequence[str], missing_rights: MissingRights) -> None:
    """Ask now and then for what was left out; returns never.

    Raises:
        RightsGrantedError: one of the kinds may be listed by now.
    """
    while True:
        await asyncio.sleep(_ASK_AGAIN_SECONDS)
        for resource in (each for each in WATCHED if each.kind in missing_rights.kinds):
            try:
                await _ask(api, resource, namespaces)
            except ApiError:
                continue
            missing_rights.granted(resource)
            raise RightsGrantedError(f"{resource.plural} can be listed by now")


async def _wait_until_listable(
    api: KubeApi, resource: Resource, namespaces: Sequence[str], missing_rights: MissingRights
) -> bool:
    said = ""
    while True:
        try:
            await _ask(api, resource, namespaces)
            missing_rights.granted(resource)
            return True
        except ApiError as error:
            if resource is NODE and error.status in FORBIDDEN:
                _log.warning("nodes may not be listed: a lost node will be told from its pods")
                return False
            sentence = _explain(resource, error)
            if resource not in (PIPELINE_MODEL, POD) and missing_rights.note(resource, error):
                _log.error("models that need them are left as they are: %s", sentence)
                return False
        if sentence != said:
            _log.warning("waiting: %s", sentence)
            said = sentence
        await asyncio.sleep(_RETRY_SECONDS)


async def _ask(api: KubeApi, resource: Resource, namespaces: Sequence[str]) -> None:
    for namespace in namespaces or ("",):
        await api.list(resource, namespace, resource.selector, limit=1)


def _explain(resource: Resource, error: ApiError) -> str:
    if error.is_not_found and resource is PIPELINE_MODEL:
        return "the CustomResourceDefinition of PipelineModels is not installed (`stageline crd` prints it)"
    if error.status in FORBIDDEN:
        return f"this operator's role must allow list and watch of {resource.plural}: {error}"
    return str(error)
