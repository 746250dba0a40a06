"""The pod fields that this node supports: an allow-list per level. Other fields are refused by their path.

There are three kinds of fields. *Honoured* ones have an effect. *Isolation* ones (`ISOLATION_NOT_PROVIDED`) are
accepted although a plain process can't have them; that is safe because they only restrict a container. All others are
refused, because ignoring them would silently make local mode differ from a cluster.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stageline_api.errors import UserError

ISOLATION_NOT_PROVIDED: Final[Mapping[str, str]] = {
    "securityContext.runAsNonRoot": "the process runs as the user who started the node",
    "securityContext.runAsUser": "the process runs as the user who started the node",
    "securityContext.runAsGroup": "the process runs with that user's group",
    "securityContext.supplementalGroups": "the process has that user's groups",
    "securityContext.fsGroup": "files belong to the user who started the node",
    "securityContext.readOnlyRootFilesystem": "the process sees the machine's file system",
    "securityContext.allowPrivilegeEscalation": "no_new_privs is not set",
    "securityContext.capabilities": "the process keeps the user's capabilities",
    "securityContext.seccompProfile": "no system call filter is installed",
    "resources.limits.cpu": "there is no cgroup, so no CPU throttling",
    "resources.limits.ephemeral-storage": "the directories can grow as far as the disk allows",
    "resources.requests.cpu": "the machine's cores are shared as the kernel sees fit",
    "volumeMounts.readOnly": "the directory can be written with the user's own permissions",
    "volumes.emptyDir.sizeLimit": "the directory can grow as far as the disk allows",
    "volumes.emptyDir.medium": "the directory is on disk; a program that opens /dev/shm sees the machine's own",
    "tolerations": "one machine has no taints",
    "affinity.preferred": "a preference among nodes; there is one",
    "topologySpreadConstraints.ScheduleAnyway": "a preference among nodes; there is one",
}

_POD: Final = {"apiVersion", "kind", "metadata", "spec", "status"}
_POD_SPEC: Final = {
    "containers",
    "initContainers",
    "volumes",
    "restartPolicy",
    "terminationGracePeriodSeconds",
    "hostname",
    "subdomain",
    "securityContext",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "nodeSelector",
}
_POD_SECURITY: Final = {"runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "seccompProfile"}
_CONTAINER_SECURITY: Final = {
    "runAsNonRoot",
    "runAsUser",
    "runAsGroup",
    "readOnlyRootFilesystem",
    "allowPrivilegeEscalation",
    "capabilities",
    "seccompProfile",
}
_CONTAINER: Final = {
    "name",
    "image",
    "imagePullPolicy",
    "command",
    "args",
    "env",
    "ports",
    "volumeMounts",
    "workingDir",
    "resources",
    "securityContext",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "startupProbe",
    "readinessProbe",
    "livenessProbe",
}
_PROBE: Final = {
    "httpGet",
    "exec",
    "tcpSocket",
    "initialDelaySeconds",
    "periodSeconds",
    "timeoutSeconds",
    "successThreshold",
    "failureThreshold",
}
_VOLUME_SOURCES: Final[Mapping[str, set[str]]] = {
    "emptyDir": {"sizeLimit", "medium"},
    "hostPath": {"path", "type"},
    "configMap": {"name"},
    "secret": {"secretName"},
}
_ENV_SOURCES: Final[Mapping[str, set[str]]] = {
    "fieldRef": {"fieldPath", "apiVersion"},
    "secretKeyRef": {"name", "key", "optional"},
    "configMapKeyRef": {"name", "key", "optional"},
}


class UnsupportedPodFieldError(UserError):
    """A manifest asks for something that a local process can't have."""


def check_pod(pod: Mapping[str, Any]) -> None:
    """Raise `UnsupportedPodFieldError` with the path of every field that would be ignored."""
    problems = list(_pod_problems(pod))
    if problems:
        name = pod.get("metadata", {}).get("name", "?")
        raise UnsupportedPodFieldError(f"pod {name!r} can't run as local processes:\n  " + "\n  ".join(problems))


def _unknown(where: str, given: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    for field in given:
        if field not in known:
            yield f"{where}.{field}: this node does not honour the field" if where else f"{field}: not a pod field"


def _must_be(where: str, given: Any, allowed: Sequence[Any]) -> Iterator[str]:
    if given not in allowed:
        yield f"{where}: {given!r} is not honoured by this node, only {' or '.join(map(repr, allowed))}"


def _pod_problems(pod: Mapping[str, Any]) -> Iterator[str]:
    spec = pod["spec"]
    yield from _unknown("", pod, _POD)
    yield from _unknown("spec", spec, _POD_SPEC)
    yield from _must_be("spec.restartPolicy", spec.get("restartPolicy", "Always"), ["Never", "Always"])
    yield from _must_be("spec.automountServiceAccountToken", spec.get("automountServiceAccountToken", True), [False])
    yield from _must_be("spec.enableServiceLinks", spec.get("enableServiceLinks", True), [False])
    yield from _unknown("spec.securityContext", spec.get("securityContext", {}), _POD_SECURITY)
    yield from _placement_problems(spec)
    for index, volume in enumerate(spec.get("volumes", [])):
        yield from _source_problems(f"spec.volumes[{index}]", volume, _VOLUME_SOURCES)
    volume_names = {volume["name"] for volume in spec.get("volumes", [])}
    for field in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(field, [])):
            yield from _container_problems(f"spec.{field}[{index}]", container, volume_names)


def _placement_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    for key, value in spec.get("nodeSelector", {}).items():
        if (key, value) != ("kubernetes.io/os", "linux"):
            yield f"spec.nodeSelector[{key!r}]: this machine has no such label"
    for kind, rules in spec.get("affinity", {}).items():
        for rule in rules:
            if rule != "preferredDuringSchedulingIgnoredDuringExecution":
                yield f"spec.affinity.{kind}.{rule}: one machine can't satisfy a required placement"
    for index, constraint in enumerate(spec.get("topologySpreadConstraints", [])):
        where = f"spec.topologySpreadConstraints[{index}].whenUnsatisfiable"
        yield from _must_be(where, constraint.get("whenUnsatisfiable", "DoNotSchedule"), ["ScheduleAnyway"])


def _source_problems(where: str, given: Mapping[str, Any], sources: Mapping[str, set[str]]) -> Iterator[str]:
    for source, value in given.items():
        if source == "name":
            continue
        if source not in sources:
            yield f"{where}.{source}: this node does not honour the field"
        else:
            yield from _unknown(f"{where}.{source}", value or {}, sources[source])


def _container_problems(where: str, container: Mapping[str, Any], volume_names: set[str]) -> Iterator[str]:
    yield from _unknown(where, container, _CONTAINER)
    if not container.get("command"):
        yield f"{where}.command: must be given; this node can't read an image's entry point"
    policy = container.get("terminationMessagePolicy", "File")
    yield from _must_be(f"{where}.terminationMessagePolicy", policy, ["File", "FallbackToLogsOnError"])
    yield from _unknown(f"{where}.securityContext", container.get("securityContext", {}), _CONTAINER_SECURITY)
    yield from _unknown(f"{where}.resources", container.get("resources", {}), {"requests", "limits"})
    for amount in ("requests", "limits"):
        given = container.get("resources", {}).get(amount, {})
        yield from _unknown(f"{where}.resources.{amount}", given, {"cpu", "memory", "ephemeral-storage"})
    for index, mount in enumerate(container.get("volumeMounts", [])):
        yield from _unknown(f"{where}.volumeMounts[{index}]", mount, {"name", "mountPath", "readOnly", "subPath"})
        if mount["name"] not in volume_names:
            yield f"{where}.volumeMounts[{index}].name: {mount['name']!r} is not a volume of the pod"
    for index, entry in enumerate(container.get("env", [])):
        yield from _unknown(f"{where}.env[{index}]", entry, {"name", "value", "valueFrom"})
        yield from _source_problems(f"{where}.env[{index}].valueFrom", entry.get("valueFrom", {}), _ENV_SOURCES)
    for field in ("startupProbe", "readinessProbe", "livenessProbe"):
        if field in container:
            yield from _probe_problems(f"{where}.{field}", container[field])


def _probe_problems(where: str, probe: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown(where, probe, _PROBE)
    yield from _unknown(f"{where}.httpGet", probe.get("httpGet", {}), {"path", "port", "scheme", "host"})
    yield from _must_be(f"{where}.httpGet.scheme", probe.get("httpGet", {}).get("scheme", "HTTP"), ["HTTP"])
    if sum(kind in probe for kind in ("httpGet", "exec", "tcpSocket")) != 1:
        yield f"{where}: exactly one of httpGet, exec and tcpSocket must be given"
