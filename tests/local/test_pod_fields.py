"""A pod field that a local process can't honour is refused by its path."""

from typing import Any

import pytest

from stageline_local.node.pod_fields import UnsupportedPodFieldError, check_pod


def pod(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    one: dict[str, Any] = {"name": "main", "image": "x", "command": ["true"]} | (container or {})
    base = {"restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False}
    return {"metadata": {"name": "p"}, "spec": base | {"containers": [one]} | spec}


def test_a_plain_pod_is_honoured() -> None:
    check_pod(pod())


@pytest.mark.parametrize(
    ("manifest", "path"),
    [
        pytest.param(pod(hostNetwork=True), "spec.hostNetwork", id="host-network"),
        pytest.param(pod(priorityClassName="high"), "spec.priorityClassName", id="priority"),
        pytest.param(pod(imagePullSecrets=[{"name": "a"}]), "spec.imagePullSecrets", id="image-pull-secrets"),
        pytest.param(pod(restartPolicy="OnFailure"), "spec.restartPolicy", id="restart-policy"),
        pytest.param(pod(automountServiceAccountToken=True), "spec.automountServiceAccountToken", id="token"),
        pytest.param(pod(securityContext={"sysctls": []}), "spec.securityContext.sysctls", id="sysctls"),
        pytest.param(pod(nodeSelector={"gpu": "yes"}), "spec.nodeSelector['gpu']", id="node-selector"),
        pytest.param(
            pod(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}),
            "spec.affinity.podAntiAffinity.required",
            id="required-affinity",
        ),
        pytest.param(pod(volumes=[{"name": "v", "nfs": {}}]), "spec.volumes[0].nfs", id="nfs"),
        pytest.param(
            pod(volumes=[{"name": "v", "configMap": {"name": "c", "items": []}}]),
            "spec.volumes[0].configMap.items",
            id="items",
        ),
        pytest.param(pod({"lifecycle": {}}), "spec.containers[0].lifecycle", id="lifecycle"),
        pytest.param(pod({"command": []}), "spec.containers[0].command", id="no-command"),
        pytest.param(pod({"envFrom": []}), "spec.containers[0].envFrom", id="env-from"),
        pytest.param(
            pod({"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {}}}]}),
            "spec.containers[0].env[0].valueFrom.resourceFieldRef",
            id="resource-field",
        ),
        pytest.param(
            pod({"volumeMounts": [{"name": "nope", "mountPath": "/x"}]}),
            "spec.containers[0].volumeMounts[0].name",
            id="mount",
        ),
        pytest.param(
            pod({"resources": {"limits": {"nvidia.com/gpu": "1"}}}),
            "spec.containers[0].resources.limits.nvidia.com/gpu",
            id="gpu",
        ),
        pytest.param(
            pod({"securityContext": {"privileged": True}}),
            "spec.containers[0].securityContext.privileged",
            id="privileged",
        ),
        pytest.param(pod({"livenessProbe": {"grpc": {"port": 1}}}), "spec.containers[0].livenessProbe.grpc", id="grpc"),
        pytest.param(
            pod({"startupProbe": {"httpGet": {"port": 1, "scheme": "HTTPS"}}}),
            "spec.containers[0].startupProbe.httpGet.scheme",
            id="https",
        ),
        pytest.param(
            pod({"terminationMessagePolicy": "Sometimes"}),
            "spec.containers[0].terminationMessagePolicy",
            id="policy",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(manifest: dict[str, Any], path: str) -> None:
    with pytest.raises(UnsupportedPodFieldError) as refusal:
        check_pod(manifest)
    assert path in refusal.value.message
