"""Facts about a model's objects besides its pods, from their manifests."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from stageline_api import labels
from stageline_operator.planner.objects.config import SPEC_FILE
from stageline_operator.planner.types import ObjectKey

OWNED_FIELDS: Final = "ownedFields"
"""Key under which a cache keeps `field_ownership.owned_fields` of an object instead of its `managedFields`."""


def applied_hashes(objects: Mapping[ObjectKey, Mapping[str, Any]]) -> dict[ObjectKey, str]:
    """`Observed.applied_hashes` of objects by (kind, name)."""
    annotations = {key: each.get("metadata", {}).get("annotations") or {} for key, each in objects.items()}
    return {key: each[labels.APPLIED_HASH] for key, each in annotations.items() if labels.APPLIED_HASH in each}


def owned_by(objects: Mapping[ObjectKey, Mapping[str, Any]]) -> dict[ObjectKey, str]:
    """`Observed.owned_fields` of objects by (kind, name), as a cache keeps it under `OWNED_FIELDS`."""
    return {key: each[OWNED_FIELDS] for key, each in objects.items() if each.get(OWNED_FIELDS) is not None}


def revision_specs(objects: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """`Observed.revision_specs` from a model's ConfigMaps; other objects are ignored."""
    specs: dict[str, Mapping[str, Any]] = {}
    for each in objects:
        revision = (each.get("metadata", {}).get("labels") or {}).get(labels.REVISION)
        text = (each.get("data") or {}).get(SPEC_FILE)
        if revision is None or text is None or each.get("kind", "ConfigMap") != "ConfigMap":
            continue
        try:
            spec = json.loads(text)
        except ValueError:
            continue  # not written by an operator: the revision is unknown
        if isinstance(spec, dict):
            specs[revision] = spec
    return specs
