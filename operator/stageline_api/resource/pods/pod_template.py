"""`spec.template.podTemplate`: a user's overlay of the stage pods, and the pod fields that it can't change. Pure.

Every field of Kubernetes' pod API is allowed, with two exceptions: fields that the group depends on (start, addresses,
termination), and fields with a counterpart in the spec. Lists with a merge key in Kubernetes are merged by it. The API
server checks the result when a pod is created; checks here refuse it before any pod is replaced.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.pods.pod import RESERVED_RULE, is_reserved_variable
from stageline_api.resource.pods.scheduling import RESERVED_KEY_RULE, RESERVED_PREFIXES
from stageline_api.resource.pods.template import RESERVED_NAME_RULE, RESERVED_VOLUMES, check_mount_path
from stageline_api.resource.pods.vllm_environment import PATH_VARIABLE

MAX_CHARACTERS: Final = 16_384
"""Limit of the overlay as JSON: it is in the object, in every pod, and in the status of a refused pod."""
OWN_CONTAINERS: Final = frozenset({"stage", "engine", "prepare", "vllm-files"})

_FIELD: Final = "has a field of its own: "
_GROUP: Final = "belongs to Stageline, because the group depends on it"
_POD_REFUSALS: Final[Mapping[str, str]] = {
    "restartPolicy": _GROUP,
    "hostname": _GROUP,
    "subdomain": _GROUP,
    "setHostnameAsFQDN": _GROUP,
    "readinessGates": "is not possible: the readiness of a stage shows whether its kubelet is alive",
    "activeDeadlineSeconds": "would end a group that serves",
    "nodeName": "would bypass the scheduler: use template.nodeSelector",
    "ephemeralContainers": "is for kubectl debug",
    "terminationGracePeriodSeconds": f"{_FIELD}template.terminationGracePeriodSeconds",
    "nodeSelector": f"{_FIELD}template.nodeSelector",
    "affinity": f"{_FIELD}template.affinity, and placement",
    "tolerations": f"{_FIELD}template.tolerations",
    "priorityClassName": f"{_FIELD}template.priorityClassName",
    "schedulerName": f"{_FIELD}template.schedulerName",
    "runtimeClassName": f"{_FIELD}template.runtimeClassName",
    "imagePullSecrets": f"{_FIELD}template.imagePullSecrets",
    "serviceAccountName": f"{_FIELD}template.serviceAccountName",
    "serviceAccount": f"{_FIELD}template.serviceAccountName",
}
_OWN_CONTAINER_FIELDS: Final = frozenset(
    {"name", "env", "envFrom", "volumeMounts", "volumeDevices", "resources", "securityContext", "lifecycle",
     "imagePullPolicy"}
)  # fmt: skip
"""Fields that may be set on Stageline's containers. Their image, command, ports and probes are fixed."""


def overlay_problems(overlay: Mapping[str, Any], path: str) -> list[FieldProblem]:
    """Everything in `overlay` that is not allowed, by `path`."""
    size = len(json.dumps(overlay))
    if size > MAX_CHARACTERS:
        rule = f"must have at most {MAX_CHARACTERS} characters as JSON"
        return [FieldProblem(path=path, value=f"{size} characters", rule=rule)]
    return list(_problems(overlay, path))


def _problems(overlay: Mapping[str, Any], path: str) -> Iterator[FieldProblem]:
    for name, part in overlay.items():
        where = f"{path}.{name}"
        if name not in ("metadata", "spec"):
            yield _problem(where, part, "is not a part of a pod template: metadata and spec are")
        elif not isinstance(part, Mapping):
            yield _problem(where, part, "must be a mapping")
        elif name == "metadata":
            yield from _metadata_problems(part, where)
        else:
            yield from _spec_problems(part, where)


def _metadata_problems(metadata: Mapping[str, Any], path: str) -> Iterator[FieldProblem]:
    for name, given in metadata.items():
        where = f"{path}.{name}"
        if name not in ("labels", "annotations"):
            yield _problem(where, given, f"{_GROUP}; labels and annotations can be given")
        elif not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
            yield _problem(where, given, "must be a mapping of strings")
        else:
            for key in given:
                if str(key).startswith(RESERVED_PREFIXES):
                    yield _problem(f"{where}[{show_value(key)}]", given[key], RESERVED_KEY_RULE)


def _spec_problems(spec: Mapping[str, Any], path: str) -> Iterator[FieldProblem]:
    for name, given in spec.items():
        where = f"{path}.{name}"
        if name in _POD_REFUSALS:
            yield _problem(where, given, _POD_REFUSALS[name])
        elif given is None:
            yield _problem(where, given, "leave the field out: an overlay can't remove what Stageline sets")
        elif name in ("containers", "initContainers", "volumes"):
            yield from _named_problems(name, given, where)


def _named_problems(name: str, given: Any, path: str) -> Iterator[FieldProblem]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        yield _problem(path, given, "must be a list")
        return
    seen: set[str] = set()
    for at, each in enumerate(given):
        where = f"{path}[{at}]"
        if not isinstance(each, Mapping) or not isinstance(each.get("name"), str):
            yield _problem(where, each, "must be a mapping with a name")
            continue
        if each["name"] in seen:
            yield _problem(f"{where}.name", each["name"], "given more than once")
        seen.add(each["name"])
        if name == "volumes":
            if each["name"] in RESERVED_VOLUMES:
                yield _problem(f"{where}.name", each["name"], RESERVED_NAME_RULE)
        elif each["name"] in OWN_CONTAINERS:
            yield from _own_container_problems(each, where)
        elif name == "containers":
            rule = (
                "is none of Stageline's containers; a sidecar is an init container with restartPolicy Always, "
                "so that its end is not the end of the stage"
            )
            yield _problem(f"{where}.name", each["name"], rule)


def _own_container_problems(container: Mapping[str, Any], path: str) -> Iterator[FieldProblem]:
    for name, given in container.items():
        where = f"{path}.{name}"
        if name not in _OWN_CONTAINER_FIELDS:
            yield _problem(where, given, _GROUP)
        elif name == "resources" and (not isinstance(given, Mapping) or given.keys() != {"claims"}):
            yield _problem(where, given, "can have claims here; requests and limits have fields of their own")
        elif name in ("env", "volumeMounts"):
            yield from _list_problems(name, given, where)


def _list_problems(name: str, given: Any, path: str) -> Iterator[FieldProblem]:
    key = "name" if name == "env" else "mountPath"
    if not isinstance(given, Sequence) or isinstance(given, str):
        yield _problem(path, given, "must be a list")
        return
    for at, each in enumerate(given):
        where = f"{path}[{at}]"
        if not isinstance(each, Mapping) or not isinstance(each.get(key), str):
            yield _problem(where, each if name != "env" else None, f"must be a mapping with a {key}")
        elif name == "env" and is_reserved_variable(each[key]):
            yield _problem(f"{where}.name", each[key], RESERVED_RULE)
        elif name == "volumeMounts" and each.get("name") in RESERVED_VOLUMES:
            yield _problem(f"{where}.name", each["name"], "is a volume that Stageline mounts where it is needed")
        elif name == "volumeMounts":
            yield from _mount_problems(each[key], f"{where}.{key}")


def _mount_problems(path: str, where: str) -> Iterator[FieldProblem]:
    try:
        check_mount_path(path)
    except ValueError as error:
        yield _problem(where, path, str(error))


def overlay_variables(overlay: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str | None]]:
    """Path, name and value of each variable that a valid overlay sets on Stageline's containers.

    None for a value from a Secret, ConfigMap or field, and for one that would replace a value that Stageline composes.
    """
    spec = overlay.get("spec", {})
    for kind in ("containers", "initContainers"):
        for at, container in enumerate(spec.get(kind, ())):
            if container["name"] in OWN_CONTAINERS:
                for number, each in enumerate(container.get("env", ())):
                    yield f"{path}.spec.{kind}[{at}].env[{number}]", each["name"], _text_value(each)


def claims_devices(overlay: Mapping[str, Any]) -> bool:
    """Whether a valid overlay gives the stage devices by ResourceClaims instead of an extended resource."""
    return any(
        each["name"] == "stage" and each.get("resources", {}).get("claims")
        for each in overlay.get("spec", {}).get("containers", ())
    )


def _text_value(variable: Mapping[str, Any]) -> str | None:
    return None if "valueFrom" in variable or variable["name"] == PATH_VARIABLE else str(variable.get("value", ""))


def _problem(path: str, value: Any, rule: str) -> FieldProblem:
    """Only names and numbers are shown: longer values may contain a secret."""
    shown = show_value(value) if isinstance(value, str | int | float) else None
    return FieldProblem(path=path, value=shown, rule=rule)
