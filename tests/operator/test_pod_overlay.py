"""A person's overlay reaches the pods and takes nothing from them that the group stands on."""

import copy
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.planned_cluster import PlannedCluster, tiny_model
from processes.repository_files import ROOT
from stageline_api.failures import FailureClass
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.pods.pod_template import (
    MAX_CHARACTERS,
    OWN_CONTAINERS,
    overlay_problems,
)
from stageline_api.resource.pods.template import RESERVED_VOLUMES
from stageline_api.resource.stage_pods import OVERLAY_PATH
from stageline_operator.planner.objects.identity import revision_of
from stageline_operator.planner.objects.pod_overlay import with_overlay


def pod_of(model: PipelineModel, stage: int = 0) -> dict[str, Any]:
    cluster = PlannedCluster(model)
    cluster.settle()
    return cluster.pod(stage)


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(
        each for each in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])] if each["name"] == name
    )


def with_template(**template: Any) -> PipelineModel:
    return tiny_model(template=template)


def test_what_has_no_field_of_its_own_is_laid_over_the_pods() -> None:
    overlay = {
        "metadata": {"labels": {"example.com/team": "a"}, "annotations": {"example.com/group": "$(MODEL)-$(GROUP)"}},
        "spec": {
            "hostNetwork": True,
            "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["store"]}],
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {
                        "matchLabels": {"stageline.dev/model": "$(MODEL)", "stageline.dev/stage": "$(STAGE)"}
                    },
                }
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "initContainers": [{"name": "watcher", "image": "example.org/watcher:1", "restartPolicy": "Always"}],
            "containers": [
                {
                    "name": "stage",
                    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "TMPDIR", "value": "/scratch"}],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                    "resources": {"claims": [{"name": "gpu"}]},
                    "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}},
                }
            ],
        },
    }
    plain, pod = pod_of(tiny_model(), 1), pod_of(with_template(podTemplate=overlay), 1)
    assert pod["metadata"]["labels"]["example.com/team"] == "a"
    assert pod["metadata"]["annotations"]["example.com/group"] == "tiny-0"
    spec = pod["spec"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet"), (
        "stages find each other by name"
    )
    [spread] = spec["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == {"stageline.dev/model": "tiny", "stageline.dev/stage": "1"}
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items(), "its own labels"
    assert spec["resourceClaims"] == overlay["spec"]["resourceClaims"]  # type: ignore[index]
    assert [each["name"] for each in spec["initContainers"]] == ["prepare", "watcher"]
    stage, before = container(pod, "stage"), container(plain, "stage")
    values = {each["name"]: each.get("value") for each in stage["env"]}
    assert (values["NCCL_DEBUG"], values["TMPDIR"]) == ("INFO", "/scratch"), values
    assert [each["name"] for each in stage["env"]].count("TMPDIR") == 1
    assert stage["volumeMounts"] == [*before["volumeMounts"], {"name": "scratch", "mountPath": "/scratch"}]
    assert stage["resources"] == before["resources"] | {"claims": [{"name": "gpu"}]}
    assert stage["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    for name in ("command", "image", "ports", "readinessProbe"):
        assert stage.get(name) == before.get(name)


def test_a_change_of_the_overlay_is_a_rollout_and_none_is_none() -> None:
    plain, empty = tiny_model(), with_template(podTemplate={})
    changed = with_template(podTemplate={"spec": {"hostNetwork": True}})
    assert revision_of(plain) == revision_of(empty) != revision_of(changed)


def test_the_service_account_is_the_pods_own_and_its_token_is_not_mounted() -> None:
    spec = pod_of(with_template(serviceAccountName="reader"))["spec"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("reader", False)


SECRET = {"secretKeyRef": {"name": "keys", "key": "token", "optional": True}}
AMOUNT = {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}


@pytest.mark.parametrize("where", ["template", "network"])
def test_a_variable_may_come_from_elsewhere(where: str) -> None:
    variables = [{"name": "TOKEN", "valueFrom": SECRET}, {"name": "MEMORY", "valueFrom": AMOUNT}]
    spec: dict[str, Any] = {where: {"env": variables}}
    pod = pod_of(tiny_model(**spec))
    given = {each["name"]: each for each in container(pod, "stage")["env"]}
    assert given["TOKEN"] == {"name": "TOKEN", "valueFrom": SECRET}
    assert given["MEMORY"] == {"name": "MEMORY", "valueFrom": AMOUNT}
    assert any(each["name"] == "TOKEN" for each in container(pod, "prepare")["env"]) is (where == "template")


def of_stage(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "stage", **fields}]}}


GROUPS, OWN = "because the group depends on it", "is set by Stageline itself"
CONTAINER = ".spec.containers[0]"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "the command": (of_stage(command=["sh"]), f"{CONTAINER}.command", GROUPS),
    "a port": (of_stage(ports=[]), f"{CONTAINER}.ports", GROUPS),
    "an image": (of_stage(image="x"), f"{CONTAINER}.image", GROUPS),
    "limits": (of_stage(resources={"limits": {"cpu": 1}}), f"{CONTAINER}.resources", "limits have fields of their own"),
    "a sidecar that ends with the pod": (
        {"spec": {"containers": [{"name": "side", "image": "x"}]}},
        f"{CONTAINER}.name",
        "an init container with restartPolicy Always",
    ),
    "its own variable": (of_stage(env=[{"name": "STAGELINE_X", "value": "1"}]), f"{CONTAINER}.env[0].name", OWN),
    "the contract's variable": (of_stage(env=[{"name": "RANK", "value": "1"}]), f"{CONTAINER}.env[0].name", OWN),
    "its volume": (
        {"spec": {"volumes": [{"name": "config", "emptyDir": {}}]}},
        ".spec.volumes[0].name",
        "Stageline itself makes",
    ),
    "its volume elsewhere": (
        of_stage(volumeMounts=[{"name": "cache", "mountPath": "/x"}]),
        f"{CONTAINER}.volumeMounts[0].name",
        "mounts where it is needed",
    ),
    "another volume in the place of its own": (
        of_stage(volumeMounts=[{"name": "scratch", "mountPath": "/tmp"}]),
        f"{CONTAINER}.volumeMounts[0].mountPath",
        "which Stageline itself mounts",
    ),
    "a label of its own": (
        {"metadata": {"labels": {"stageline.dev/stage": "7"}}},
        '.metadata.labels["stageline.dev/stage"]',
        "are set by Stageline itself",
    ),
    "the name": ({"metadata": {"name": "mine"}}, ".metadata.name", "labels and annotations can be given"),
    "restarts": ({"spec": {"restartPolicy": "Always"}}, ".spec.restartPolicy", GROUPS),
    "a node": ({"spec": {"nodeName": "n"}}, ".spec.nodeName", "use template.nodeSelector"),
    "a field of its own": ({"spec": {"tolerations": []}}, ".spec.tolerations", "a field of its own: template.tolerat"),
    "gates": ({"spec": {"readinessGates": []}}, ".spec.readinessGates", "whether its kubelet is alive"),
    "taking away": ({"spec": {"securityContext": None}}, ".spec.securityContext", "leave the field out"),
    "no list": ({"spec": {"volumes": {"name": "x"}}}, ".spec.volumes", "must be a list"),
    "no name": ({"spec": {"containers": [{"env": []}]}}, CONTAINER, "must be a mapping with a name"),
    "twice": ({"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}}, ".spec.volumes[1].name", "more than once"),
    "a status": ({"status": {}}, ".status", "is not a part of a pod template"),
    "too much": ({"metadata": {"annotations": {"a": "x" * MAX_CHARACTERS}}}, "", "at most 16384 characters as JSON"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_group_stands_on_is_refused_by_its_path(what: str) -> None:
    overlay, path, words = REFUSED[what]
    problems = overlay_problems(overlay, OVERLAY_PATH)
    assert [each.path for each in problems] == [f"{OVERLAY_PATH}{path}"], problems
    assert words in problems[0].rule
    with pytest.raises(ValidationError, match=re.escape(OVERLAY_PATH)):
        with_template(podTemplate=overlay)


def test_no_refusal_repeats_a_value_that_may_be_a_secret() -> None:
    secret = "hunter2"
    for part in ({"env": [{"value": secret}]}, {"command": [secret]}, {"ports": {"x": secret}}):
        problems = overlay_problems({"spec": {"containers": [{"name": "stage", **part}]}}, "p")
        assert problems
        assert secret not in str(problems)


def test_variables_that_vllm_must_not_have_are_found_in_the_overlay_too() -> None:
    overlay = {"spec": {"containers": [{"name": "stage", "env": [{"name": "VLLM_HOST_IP", "value": "1"}]}]}}
    with_template(podTemplate=overlay)
    with pytest.raises(ValidationError, match=re.escape(f"{OVERLAY_PATH}{CONTAINER}.env[0].name")):
        tiny_model(engine={"name": "vllm"}, template={"podTemplate": overlay})


def test_a_sidecar_that_ends_is_its_kubelets_matter() -> None:
    sidecar = {"name": "watcher", "image": "x", "restartPolicy": "Always"}
    cluster = PlannedCluster(with_template(podTemplate={"spec": {"initContainers": [sidecar]}}))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    assert cluster.phase() == "Ready"
    ended = {"terminated": {"exitCode": 1, "finishedAt": cluster.now.isoformat()}}
    cluster.pod(1)["status"]["initContainerStatuses"] = [{"name": "watcher", "state": ended}]
    cluster.settle()
    cluster.advance(60)
    cluster.settle()
    assert (cluster.phase(), cluster.status.last_failures) == ("Ready", ())
    cluster.pod(1)["status"]["initContainerStatuses"] = [{"name": "prepare", "state": ended}]
    cluster.settle()
    cluster.advance(60)
    cluster.settle()
    assert cluster.status.last_failures[0].failure_class == FailureClass.INTERNAL


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*sorted(OWN_CONTAINERS), *sorted(RESERVED_VOLUMES), "mine", "other"])
FIELDS = st.sampled_from(
    ["command", "image", "env", "volumeMounts", "resources", "securityContext", "lifecycle", "ports", "livenessProbe"]
)
ENTRY = st.builds(lambda name, rest: {**rest, "name": name}, NAMES, st.dictionaries(FIELDS, JSON, max_size=3))
POD = st.fixed_dictionaries(
    {},
    optional={
        "containers": st.lists(ENTRY, max_size=3) | JSON,
        "initContainers": st.lists(ENTRY, max_size=3) | JSON,
        "volumes": st.lists(ENTRY, max_size=3) | JSON,
        "hostNetwork": st.booleans(),
        "restartPolicy": JSON,
        "securityContext": JSON,
        "dnsConfig": JSON,
    },
)
OVERLAYS = st.fixed_dictionaries({}, optional={"spec": POD | JSON, "metadata": JSON, "kind": JSON})
PLAIN = pod_of(tiny_model())


@given(OVERLAYS)
def test_an_overlay_that_is_not_refused_leaves_all_of_stagelines_in_place(overlay: dict[str, Any]) -> None:
    """And whatever it is, it is told apart without an exception."""
    if overlay_problems(overlay, "p"):
        return
    before = copy.deepcopy(PLAIN)
    pod = with_overlay(PLAIN, overlay)
    assert before == PLAIN
    assert PLAIN["metadata"]["labels"].items() <= pod["metadata"]["labels"].items()
    for kind in ("containers", "initContainers"):
        for each in PLAIN["spec"].get(kind, []):
            [same] = [one for one in pod["spec"][kind] if one["name"] == each["name"]]
            for name in ("command", "image", "ports", "livenessProbe", "readinessProbe", "startupProbe"):
                assert same.get(name) == each.get(name), name
            assert {one["name"] for one in each["env"]} <= {one["name"] for one in same["env"]}
    assert {each["name"] for each in PLAIN["spec"]["volumes"]} <= {each["name"] for each in pod["spec"]["volumes"]}
    for name in ("restartPolicy", "hostname", "subdomain"):
        assert pod["spec"][name] == PLAIN["spec"][name]


def test_devices_that_are_claimed_are_not_asked_for_a_second_time() -> None:
    claimed = {"containers": [{"name": "stage", "resources": {"claims": [{"name": "gpu"}]}}]}
    claim = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}
    for spec, limits in (({}, {"nvidia.com/gpu": "1"}), (claim | claimed, {})):
        engine = {"device": "cuda", "maxNumSeqs": 4, "maxModelLen": 256}
        pod = pod_of(tiny_model(engine=engine, template={"podTemplate": {"spec": spec}}))
        resources = container(pod, "stage")["resources"]
        assert resources.get("limits", {}) == limits, pod
        assert resources.get("claims", []) == ([{"name": "gpu"}] if not limits else []), pod


def test_constraints_of_one_topology_stay_apart() -> None:
    """Kubernetes tells them apart by two fields, so none is merged: Stageline has none of its own."""
    kinds = ("DoNotSchedule", "ScheduleAnyway")
    spread = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": kind} for kind in kinds]
    pod = pod_of(with_template(podTemplate={"spec": {"topologySpreadConstraints": spread}}))
    assert pod["spec"]["topologySpreadConstraints"] == spread


def test_what_nvlink_between_pods_takes_reaches_the_pods() -> None:
    """As docs/gpu.md has it."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    (written,) = re.findall(r"```yaml\n(template:\n.*?NCCL_HOSTID.*?)```", page, re.DOTALL)
    model = with_template(**yaml.safe_load(written)["template"])
    for stage in range(model.spec.parallelism.pipeline):
        pod = pod_of(model, stage)
        assert pod["spec"]["hostIPC"] is True
        environment = {each["name"]: each for each in container(pod, "stage")["env"]}
        assert environment["NCCL_HOSTID"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
        assert environment["NCCL_CUMEM_ENABLE"]["value"] == "0"
