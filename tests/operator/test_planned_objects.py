"""What the planner makes of a PipelineModel: valid, complete and the same every time."""

import json
from typing import Any

import pytest

from stageline_api import env, labels, ports
from stageline_api.pipeline_model import PipelineModel
from stageline_api.runtime_config import LayerRange, RuntimeConfig
from stageline_local.pod_fields import check_pod
from stageline_operator.objects import (
    GroupIncarnation,
    build_bus_secret,
    build_config,
    build_config_map,
    build_engine_service,
    build_headless_service,
    build_stage_pod,
    revision_of,
)

LIFE = GroupIncarnation(group=1, incarnation=7)
IMAGE = "stageline:test"


def pipeline_model(uid: str | None = None, **spec: Any) -> PipelineModel:
    document: dict[str, Any] = {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": "tiny", "namespace": "lab"} | ({"uid": uid} if uid else {}),
        "spec": {"model": {"source": "file:///models/tiny"}, "parallelism": {"pipeline": 2}} | spec,
    }
    return PipelineModel.model_validate(document)


def stage_pod(model: PipelineModel, stage: int) -> dict[str, Any]:
    return build_stage_pod(model, LIFE, stage, revision_of(model, IMAGE), IMAGE)


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
    assert values[env.BUS_TOKEN] == {"secretKeyRef": {"name": "tiny-bus", "key": "token"}}


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


def test_the_cache_is_the_pods_own_unless_a_host_path_is_given() -> None:
    def cache(model: PipelineModel) -> Any:
        return next(v for v in stage_pod(model, 0)["spec"]["volumes"] if v["name"] == "cache")

    assert cache(pipeline_model()) == {"name": "cache", "emptyDir": {}}
    shared = {"source": "file:///models/tiny", "cache": {"hostPath": "/data/cache"}}
    assert cache(pipeline_model(model=shared))["hostPath"] == {"path": "/data/cache", "type": "DirectoryOrCreate"}


def test_the_hub_token_reaches_prepare_alone() -> None:
    model = pipeline_model(model={"source": "hf://org/name", "tokenSecretRef": {"name": "hub", "key": "t"}})
    pod = stage_pod(model, 0)
    assert environment(container(pod, "prepare"))[env.HF_TOKEN] == {"secretKeyRef": {"name": "hub", "key": "t"}}
    assert env.HF_TOKEN not in environment(container(pod, "stage"))
    assert env.HF_TOKEN not in environment(container(pod, "engine"))


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
    assert [RuntimeConfig.model_validate_json(text) for text in data.values()] == [config]


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
    ],
)
def test_the_revision_changes_exactly_when_pods_would(change: dict[str, Any], replaces_pods: bool) -> None:
    before, after = revision_of(pipeline_model(), IMAGE), revision_of(pipeline_model(**change), IMAGE)
    assert (before != after) is replaces_pods


def test_the_process_node_can_honour_planned_pods() -> None:
    for stage in range(2):
        check_pod(stage_pod(pipeline_model(), stage))
