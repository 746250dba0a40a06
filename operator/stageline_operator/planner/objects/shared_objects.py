"""The objects of a model besides its pods: which to apply and which to delete.

Each object carries the hash of its manifest, and its `managedFields` show whether it was changed since. So no object is
read or written while they all match.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stageline_api import labels
from stageline_api.conditions import EventReason
from stageline_api.resource.life.status import GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.objects import (
    GroupIncarnation,
    build_access_policies,
    build_bus_secret,
    build_config_map,
    build_disruption_budget,
    build_engine_keys_secret,
    build_engine_service,
    build_headless_service,
    build_incarnation_policy,
    build_pod_group,
)
from stageline_operator.planner.objects.cache_claims import CLAIM, build_cache_claims, kept_claims
from stageline_operator.planner.objects.field_ownership import owns_all_of
from stageline_operator.planner.objects.gang_objects import GANG_OBJECT_KINDS, gang_name
from stageline_operator.planner.objects.identity import (
    cache_claim_name,
    config_map_name,
    disruption_budget_name,
    incarnation_policy_name,
)
from stageline_operator.planner.types import Deletion, ObjectKey, PlannedEvent, kind_of

_REMADE_KINDS = ("ConfigMap", "NetworkPolicy", "PodDisruptionBudget", *GANG_OBJECT_KINDS, CLAIM)
"""Kinds of which a model may have outdated objects. Services and Secrets live at least as long as the model."""


@dataclass(frozen=True)
class SharedObjects:
    """Writes of one pass."""

    apply: tuple[dict[str, Any], ...]
    delete: tuple[Deletion, ...]
    events: tuple[PlannedEvent, ...]
    needed_by: dict[ObjectKey, frozenset[int]]
    """Groups whose pods need an object, if not all of them do."""


def plan_shared_objects(
    context: Context, groups: Sequence[GroupStatus], kept_pods: int, random_token: str
) -> SharedObjects:
    """Apply objects that are missing, outdated or edited, and delete those that no group uses.

    An eviction must leave `kept_pods`. Deleted are the configs of revisions, the policies and gang objects of
    incarnations, and the claims of stages that no group has any more.
    """
    manifests = list(_wanted(context, groups, kept_pods, random_token))
    wanted = {_key(each) for each in manifests}
    wanted |= {("ConfigMap", config_map_name(context.model, group.revision)) for group in groups}
    # What an unknown revision asked for is unknown; its pods may still be in a PodGroup.
    forgotten = [_life(group) for group in groups if context.model_at(group.revision) is None]
    wanted |= {(kind, gang_name(context.model, life)) for life in forgotten for kind in GANG_OBJECT_KINDS}
    wanted |= {(CLAIM, name) for name in _kept_claims(context, groups)}
    stale = sorted(key for key in context.observed.objects if key[0] in _REMADE_KINDS and key not in wanted)
    edited = [each for each in manifests if _was_edited(context, each)]
    differing = [each for each in manifests if _differs(context, each) or each in edited]
    remade = sorted(_claims_to_remake(context, groups) & set(map(_key, differing)))
    missing = tuple(each for each in differing if _key(each) not in remade)
    deletions = tuple(Deletion(kind, name) for kind, name in (*stale, *remade))
    events = (*map(_restored, edited), *(_remade(name) for _, name in remade))
    return SharedObjects(missing, deletions, events, _needed_by(context, groups))


def changed_budget(context: Context, kept_pods: int) -> tuple[dict[str, Any], ...]:
    """The PodDisruptionBudget, if it exists and differs."""
    budget = _hashed(build_disruption_budget(context.model, kept_pods))
    return (budget,) if _key(budget) in context.observed.objects and _differs(context, budget) else ()


def _needed_by(context: Context, groups: Sequence[GroupStatus]) -> dict[ObjectKey, frozenset[int]]:
    model = context.model
    of_revision = frozenset(group.index for group in groups if group.revision == context.revision)
    found = {("ConfigMap", config_map_name(model, context.revision)): of_revision}
    found["PodDisruptionBudget", disruption_budget_name(model)] = frozenset()
    for group in groups:
        own = frozenset({group.index})
        found["NetworkPolicy", incarnation_policy_name(model, _life(group))] = own
        found |= {(kind, gang_name(model, _life(group))): own for kind in GANG_OBJECT_KINDS}
        found |= {(CLAIM, name): own for name in _claim_names(context, group)}
    return found


def _claims_to_remake(context: Context, groups: Sequence[GroupStatus]) -> set[ObjectKey]:
    """Claims that can't be changed to what their group's revision asks for and that no pod uses. Their data is not
    unique.

    That is another storage class, a smaller size, or a larger one whose class doesn't allow expansion.
    """
    in_use = {pod["metadata"]["labels"][labels.GROUP] for pod in context.observed.pods}
    idle = [group for group in groups if str(group.index) not in in_use]
    own = {(CLAIM, name) for group in idle for name in _claim_names(context, group)}
    return own & context.observed.unchangeable & context.observed.objects


def _claim_names(context: Context, group: GroupStatus) -> list[str]:
    return [cache_claim_name(context.model, group.index, at) for at in range(context.stage_count(group))]


def _remade(claim: str) -> PlannedEvent:
    message = (
        f"{CLAIM} {claim} can't become what the template asks for, and is recreated; its weights are prepared again"
    )
    return PlannedEvent("Normal", EventReason.CLAIM_REPLACED, message)


def _wanted(
    context: Context, groups: Sequence[GroupStatus], kept_pods: int, random_token: str
) -> Iterator[dict[str, Any]]:
    model = context.model
    yield build_config_map(model, context.revision)
    # One token is for stages, the other for gateways: they must be independent.
    yield build_bus_secret(model, _drawn(random_token, "plan bus"))
    yield build_engine_keys_secret(model, _drawn(random_token, "engine keys"))
    changing = [build_headless_service(model), build_engine_service(model)]
    if not model.spec.suspend:
        changing.append(build_disruption_budget(model, kept_pods))
    changing += build_access_policies(model, context.setting)
    changing += [build_incarnation_policy(model, _life(each)) for each in groups]
    changing += _pod_groups(context, groups)
    changing += _cache_claims(context, groups)
    yield from (_hashed(each) for each in changing)


def _pod_groups(context: Context, groups: Sequence[GroupStatus]) -> Iterator[dict[str, Any]]:
    """PodGroups as each group's own revision asks for them."""
    for each in groups:
        model = context.model_at(each.revision)
        pod_group = None if model is None else build_pod_group(model, _life(each))
        if pod_group is not None:
            yield pod_group


def _cache_claims(context: Context, groups: Sequence[GroupStatus]) -> Iterator[dict[str, Any]]:
    for each in groups:
        model = context.model_at(each.revision)
        yield from () if model is None else build_cache_claims(model, each.index)


def _kept_claims(context: Context, groups: Sequence[GroupStatus]) -> Iterator[str]:
    yield from kept_claims(context.model)
    for each in groups:
        if context.model_at(each.revision) is None:
            yield from _claim_names(context, each)


def _life(group: GroupStatus) -> GroupIncarnation:
    return GroupIncarnation(group.index, group.incarnation)


def _drawn(random_token: str, purpose: str) -> str:
    return hmac.new(random_token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def _hashed(manifest: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(manifest, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return manifest | {"metadata": manifest["metadata"] | {"annotations": {labels.APPLIED_HASH: digest}}}


def _differs(context: Context, manifest: dict[str, Any]) -> bool:
    key = _key(manifest)
    if key not in context.observed.objects:
        return True
    made_from = context.observed.applied_hashes.get(key)
    wanted = manifest["metadata"].get("annotations", {}).get(labels.APPLIED_HASH)
    return made_from is not None and made_from != wanted


def _was_edited(context: Context, manifest: dict[str, Any]) -> bool:
    owned = context.observed.owned_fields.get(_key(manifest))
    return owned is not None and not _differs(context, manifest) and not owns_all_of(owned, manifest)


def _restored(manifest: dict[str, Any]) -> PlannedEvent:
    kind, name = _key(manifest)
    return PlannedEvent("Normal", EventReason.OBJECT_RESTORED, f"{kind} {name} was edited and is restored")


def _key(manifest: dict[str, Any]) -> ObjectKey:
    return kind_of(manifest), manifest["metadata"]["name"]
