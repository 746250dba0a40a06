"""Kubernetes' own gang scheduling: what an incarnation's object holds and its pods name, by the cluster's version.

From 1.36 on the policy is in a PodGroup that pods name by `schedulingGroup`. 1.35 has it in a Workload, by
`workloadRef`; later a Workload is a template of PodGroups, of which a single one needs none. Both are off unless
somebody switches them on. Sources: k8s.io/api/scheduling of 0.35 to 0.37, KEP-4671, KEP-5832. Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from stageline_operator.planner.types import NATIVE_GROUP, POD_GROUP, WORKLOAD

KIND_OF_API: Final[Mapping[str, str]] = {
    f"{NATIVE_GROUP}/v1beta1": POD_GROUP,
    f"{NATIVE_GROUP}/v1alpha3": POD_GROUP,
    f"{NATIVE_GROUP}/v1alpha2": POD_GROUP,
    f"{NATIVE_GROUP}/v1alpha1": WORKLOAD,
}
"""What each version has, the one to prefer first. 1.37 serves two at once, of the same objects."""
PREFERRED_API: Final = next(iter(KIND_OF_API))
_WITHOUT_PRIORITY: Final = (f"{NATIVE_GROUP}/v1alpha2",)
"""Here priority and disruption depend on another feature gate, and are refused without it."""
_ONLY_GROUP: Final = "stages"


def native_manifest(
    api: str, metadata: Mapping[str, Any], pods: int, priority_class_name: str | None
) -> dict[str, Any]:
    """The object that makes `pods` pods a gang, at the version `api` (empty: at the one that is preferred).

    A preemption takes all of it, since a pipeline without one of its stages serves nobody.
    """
    api = api or PREFERRED_API
    gang = {"gang": {"minCount": pods}}
    spec: dict[str, Any]
    if KIND_OF_API[api] == WORKLOAD:
        spec = {"podGroups": [{"name": _ONLY_GROUP, "policy": gang}]}
    else:
        spec = {"schedulingPolicy": gang}
        if api not in _WITHOUT_PRIORITY:
            # A group that names none has priority 0, whatever its pods say.
            spec |= {"disruptionMode": {"all": {}}} | (
                {} if priority_class_name is None else {"priorityClassName": priority_class_name}
            )
    return {"apiVersion": api, "kind": KIND_OF_API[api], "metadata": dict(metadata), "spec": spec}


def native_reference(api: str, name: str) -> dict[str, Any]:
    """The field of a pod spec by which the pod joins the object `name`."""
    if KIND_OF_API[api or PREFERRED_API] == WORKLOAD:
        return {"workloadRef": {"name": name, "podGroup": _ONLY_GROUP}}
    return {"schedulingGroup": {"podGroupName": name}}
