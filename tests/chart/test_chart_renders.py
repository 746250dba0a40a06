"""The chart, linted and rendered by Helm's engine: what each value brings about, and what holds for every one."""

import json
from pathlib import Path
from typing import Any

import click
import helm_python
import pytest
import yaml

from cluster.rendered_chart import (
    CHART,
    NAMESPACE,
    NOTES,
    copy_of_chart,
    found,
    of_kind,
    pod_specs,
    rendered_files,
    rendered_objects,
)
from stageline_api import ports
from stageline_api.engine_access import KEYS_SECRET
from stageline_api.manifests import crd
from stageline_cli.main import cli, run
from stageline_dashboards.shipped import board_paths
from stageline_operator.controller.client.rbac import lease_rules, node_rules, workload_rules
from stageline_operator.planner.types import Setting
from stageline_vllm.versions import SUPPORTED_RANGE

PICKER: dict[str, Any] = {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "namespaced": {"operator": {"namespaces": ["team-a", "team-b"], "watchNodes": False}},
    "gateway of several": {"gateway": {"namespaces": ["team-a", "team-b"]}},
    "pooled": {"gateway": {"inferencePool": {"enabled": True, "endpointPickerRef": PICKER}}},
    "gateway only": {"operator": {"enabled": False}, "crds": {"install": False}},
    "operator only": {"gateway": {"enabled": False}},
    "monitored": {"monitoring": {"monitors": "always", "rules": "always", "labels": {"release": "prometheus"}}},
    "secured": {"gateway": {"keys": {"secretName": "keys"}, "tls": {"secretName": "tls"}}},
    "open to pages": {"gateway": {"corsOrigins": ["https://chat.example.org:8443"]}},
    "labelled": {
        "commonLabels": {"team": "models"},
        "commonAnnotations": {"note": "x"},
        "operator": {"podLabels": {"team": "ops"}, "podAnnotations": {"a": "b"}},
    },
    "with images for vllm": {"vllm": {"image": "m.example.com/vllm:1", "filesImage": "m.example.com/files:2"}},
    "placed": {
        "operator": {
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"key": "system", "operator": "Exists"}],
            "priorityClassName": "high",
        }
    },
}
VARIANT = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)


def container(objects: list[dict[str, Any]], component: str) -> dict[str, Any]:
    """The container of operator or gateway."""
    (spec,) = [each for each in pod_specs(objects) if each["containers"][0]["name"] == component]
    return dict(spec["containers"][0])


@VARIANT
def test_helm_finds_nothing_to_say(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True, namespace=NAMESPACE)
    assert [each["error"] for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize(
    ("seconds", "values"), [(30, {}), (120, {"nodeLostSeconds": 120}), (0, {"nodeLostSeconds": 0})]
)
def test_pods_leave_a_lost_node_long_before_kubernetes_own_five_minutes(seconds: int, values: dict[str, Any]) -> None:
    own = {"key": "system", "operator": "Exists"}
    chosen = {"tolerations": [own], **values}
    for spec in pod_specs(rendered_objects({"operator": chosen, "gateway": chosen})):
        first, *others = spec["tolerations"]
        assert first == own
        assert {(each["key"], each["effect"], each["tolerationSeconds"]) for each in others} == {
            (f"node.kubernetes.io/{trouble}", "NoExecute", seconds) for trouble in ("not-ready", "unreachable")
        }


@VARIANT
def test_every_object_is_named_once_and_labelled(values: dict[str, Any]) -> None:
    objects = rendered_objects(values)
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names) > 5
    for each in objects:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == labels["app.kubernetes.io/name"] == "stageline", each
        assert all(labels.get(key) == value for key, value in values.get("commonLabels", {}).items()), each


@VARIANT
def test_every_pod_is_restricted_and_bounded(values: dict[str, Any]) -> None:
    specs = pod_specs(rendered_objects(values))
    assert specs
    for spec in specs:
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all("hostPath" not in volume for volume in spec["volumes"])
        for each in spec["containers"]:
            security = each["securityContext"]
            assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert set(each["resources"]["requests"]) == {"cpu", "memory"}
            assert set(each["resources"]["limits"]) == {"memory"}
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(each)


@VARIANT
def test_containers_are_started_with_options_that_exist(values: dict[str, Any]) -> None:
    for spec in pod_specs(rendered_objects(values)):
        for each in spec["containers"]:
            program, name = each["command"]
            assert program == "stageline"
            command = cli.get_command(click.Context(cli), name)
            assert command is not None
            known = {option for parameter in command.params for option in parameter.opts}
            given = {argument.partition("=")[0] for argument in each["args"]}
            assert given <= known, given - known


def test_a_models_network_policies_let_the_charts_pods_in() -> None:
    """The operator finds gateway and operator by labels, whatever the release is called."""
    peers = Setting("image")
    for component, wanted in (("gateway", peers.gateway), ("operator", peers.operator)):
        objects = rendered_objects({"fullnameOverride": "other"}, name="another")
        labels = found(objects, "Deployment", f"other-{component}")["spec"]["template"]["metadata"]["labels"]
        assert wanted.pod_labels.items() <= labels.items()


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({}, ["stageline-system=http://stageline-gateway.stageline-system.svc:80/v1"]),
        (
            {"gateway": {"namespace": "m", "tls": {"secretName": "t"}, "service": {"port": 443}}},
            ["m=https://stageline-gateway.stageline-system.svc:443/v1"],
        ),
        (
            {"gateway": {"namespaces": ["a", "b"]}},
            [f"{each}=http://stageline-gateway.stageline-system.svc:80/v1" for each in ("a", "b")],
        ),
        ({"gateway": {"enabled": False}}, []),
    ],
    ids=["default", "tls", "several", "no-gateway"],
)
def test_the_operator_knows_where_the_gateway_serves_its_models(values: dict[str, Any], shown: list[str]) -> None:
    options = [each.split("=", 1) for each in container(rendered_objects(values), "operator")["args"]]
    assert [value for name, value in options if name == "--gateway-url"] == shown


def test_one_value_names_the_collector_for_the_gateway_and_for_engines() -> None:
    told = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}
    values = {"tracing": {"endpoint": "http://c:4318", "env": {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}}}
    for each, wanted in (({}, {}), ({"tracing": {"env": values["tracing"]["env"]}}, {}), (values, told)):
        objects = rendered_objects(each)
        environment = {one["name"]: one.get("value") for one in container(objects, "gateway")["env"]}
        assert {name: value for name, value in environment.items() if name.startswith("OTEL_")} == wanted
        given = [one.removeprefix("--tracing-env=") for one in container(objects, "operator")["args"] if "OTEL" in one]
        assert dict(one.split("=", 1) for one in given) == wanted


def test_ports_are_those_of_the_programs() -> None:
    objects = rendered_objects()
    assert [port["containerPort"] for port in container(objects, "operator")["ports"]] == [ports.OPERATOR_METRICS]
    listening = {port["name"]: port["containerPort"] for port in container(objects, "gateway")["ports"]}
    assert listening == {"http": ports.GATEWAY, "admin": ports.GATEWAY_ADMIN}


def test_the_crd_is_the_generated_one_and_survives_uninstalling() -> None:
    rendered = found(rendered_objects(), "CustomResourceDefinition")
    generated = yaml.safe_load(crd.render_crd())
    assert rendered["spec"] == generated["spec"]
    assert rendered["metadata"]["name"] == generated["metadata"]["name"]
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert (
        "annotations" not in found(rendered_objects({"crds": {"keep": False}}), "CustomResourceDefinition")["metadata"]
    )
    assert of_kind(rendered_objects({"crds": {"install": False}}), "CustomResourceDefinition") == []
    assert not (CHART / "crds").exists(), "Helm would install these too, and never update them"


def test_the_operator_gets_exactly_the_generated_rules() -> None:
    objects = rendered_objects()
    role = found(objects, "ClusterRole", "stageline-system-stageline-operator")
    assert role["rules"] == [*workload_rules(), *node_rules()]
    assert found(objects, "Role", "stageline-operator-lease")["rules"] == lease_rules()


def test_a_namespaced_operator_gets_no_rule_beyond_its_namespaces() -> None:
    operator: dict[str, Any] = {"namespaces": ["team-a", "team-b"]}
    values: dict[str, Any] = {"operator": operator, "rbac": {"aggregate": False}}
    objects = rendered_objects(values)
    assert found(objects, "ClusterRole")["rules"] == node_rules()
    roles = {
        role["metadata"]["namespace"]: role["rules"]
        for role in of_kind(objects, "Role")
        if role["metadata"]["name"].endswith("stageline-operator")
    }
    assert roles == {"team-a": workload_rules(), "team-b": workload_rules()}
    assert "--namespace=team-a,team-b" in container(objects, "operator")["args"]
    operator["watchNodes"] = False
    assert of_kind(rendered_objects(values), "ClusterRole") == []


def test_the_gateway_may_only_read_its_namespace() -> None:
    role = found(rendered_objects({"gateway": {"namespace": "models"}}), "Role", "stageline-system-stageline-gateway")
    assert role["metadata"]["namespace"] == "models"
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert [rule["resources"] for rule in role["rules"]] == [["pods"], ["secrets"], ["pipelinemodels"]]
    (secrets,) = (rule for rule in role["rules"] if rule["resources"] == ["secrets"])
    assert (secrets["resourceNames"], secrets["verbs"]) == ([KEYS_SECRET], ["get"])


def test_a_gateway_of_several_namespaces_has_a_role_in_each_and_none_besides() -> None:
    objects = rendered_objects({"gateway": {"namespaces": ["team-a", "team-b"]}})
    name = "stageline-system-stageline-gateway"
    roles = {
        each["metadata"]["namespace"]: each for each in of_kind(objects, "Role") if each["metadata"]["name"] == name
    }
    bindings = [each for each in of_kind(objects, "RoleBinding") if each["metadata"]["name"] == name]
    (alone,) = (each for each in of_kind(rendered_objects(), "Role") if each["metadata"]["name"] == name)
    assert {where: role["rules"] for where, role in roles.items()} == dict.fromkeys(
        ("team-a", "team-b"), alone["rules"]
    )
    assert [each["metadata"]["namespace"] for each in bindings] == ["team-a", "team-b"]
    for each in bindings:
        account = {"kind": "ServiceAccount", "name": "stageline-gateway", "namespace": "stageline-system"}
        assert (each["subjects"], each["roleRef"]["name"]) == ([account], name)
    assert not [each for each in of_kind(objects, "ClusterRoleBinding") if "gateway" in each["metadata"]["name"]]
    assert "--namespace=team-a,team-b" in container(objects, "gateway")["args"]


@pytest.mark.parametrize("picker", [{}, PICKER], ids=["without a picker", "with one"])
def test_an_inference_pool_is_of_what_answers_clients(picker: dict[str, Any]) -> None:
    objects = rendered_objects({"gateway": {"inferencePool": {"enabled": True, "endpointPickerRef": picker}}})
    pool = found(objects, "InferencePool", "stageline-gateway")
    deployment = found(objects, "Deployment", "stageline-gateway")
    assert pool["metadata"]["namespace"] == deployment["metadata"]["namespace"], "it selects none of another namespace"
    assert pool["spec"]["selector"] == deployment["spec"]["selector"]
    listening = {each["name"]: each["containerPort"] for each in container(objects, "gateway")["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": listening["http"]}]
    assert pool["spec"].get("endpointPickerRef", {}) == picker
    assert set(pool["spec"]) <= {"selector", "targetPorts", "endpointPickerRef"}, "what version 1.0 of the API has"


@pytest.mark.parametrize(
    ("gateway", "words"),
    [
        ({"inferencePool": {"enabled": True}, "tls": {"secretName": "t"}}, "gateway.tls.secretName must be empty"),
        ({"namespaces": ["a"], "namespace": "b"}, 'gateway.namespace: "b" is given beside gateway.namespaces'),
    ],
)
def test_values_that_exclude_each_other_are_refused_by_name(gateway: dict[str, Any], words: str) -> None:
    with pytest.raises(helm_python.HelmError) as refusal:
        rendered_objects({"gateway": gateway})
    assert words in str(refusal.value)


def test_no_pool_is_made_unasked_or_without_a_gateway() -> None:
    assert of_kind(rendered_objects(), "InferencePool") == []
    assert (
        of_kind(rendered_objects({"gateway": {"enabled": False, "inferencePool": {"enabled": True}}}), "InferencePool")
        == []
    )


def test_the_gateway_is_told_which_pages_may_ask() -> None:
    origins = ["https://chat.example.org", "*"]
    told = container(rendered_objects({"gateway": {"corsOrigins": origins}}), "gateway")["args"]
    assert [option for option in told if "cors" in option] == [f"--cors-origin={origin}" for origin in origins]
    assert not any("cors" in option for option in container(rendered_objects({}), "gateway")["args"])


def test_who_may_scrape_is_told_to_the_operator_for_models_too() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"team": "o'clock: #1"}}, "podSelector": {}}]
    objects = rendered_objects({"networkPolicy": {"metricsFrom": peers}})
    (arguments,) = (
        each["spec"]["template"]["spec"]["containers"][0]["args"]
        for each in of_kind(objects, "Deployment")
        if each["metadata"]["name"] == "stageline-operator"
    )
    (given,) = (each for each in arguments if each.startswith("--metrics-from="))
    assert json.loads(given.partition("=")[2]) == peers


def test_the_clusters_own_roles_cover_pipelinemodels() -> None:
    roles = {
        name: role
        for role in of_kind(rendered_objects(), "ClusterRole")
        for name in ("admin", "edit", "view")
        if role["metadata"]["labels"].get(f"rbac.authorization.k8s.io/aggregate-to-{name}") == "true"
    }
    assert set(roles) == {"admin", "edit", "view"}
    assert roles["view"]["rules"][0]["verbs"] == ["get", "list", "watch"]
    assert "delete" in roles["edit"]["rules"][0]["verbs"]
    for role in roles.values():
        assert {resource for rule in role["rules"] for resource in rule["resources"]} == {
            "pipelinemodels",
            "pipelinemodels/scale",
            "pipelinemodels/status",
        }


def test_an_image_is_named_by_registry_and_digest_before_tag() -> None:
    def image(**images: Any) -> str:
        return str(container(rendered_objects({"images": images}), "operator")["image"])

    digest = "sha256:" + "0" * 64
    assert image() == "stageline-operator:0.1.0"
    assert image(registry="r.example.com/x/") == "r.example.com/x/stageline-operator:0.1.0"
    assert image(operator={"tag": "v9"}) == "stageline-operator:v9"
    assert image(operator={"tag": "v9", "digest": digest}) == f"stageline-operator@{digest}"
    args = container(rendered_objects({"images": {"registry": "r", "runtime": {"tag": "cuda"}}}), "operator")["args"]
    assert "--image=r/stageline-runtime:cuda" in args


def test_the_operator_is_told_which_runtime_class_gpus_need() -> None:
    assert "gpu-runtime-class" not in str(container(rendered_objects({}), "operator")["args"])
    args = container(rendered_objects({"gpu": {"runtimeClassName": "nvidia"}}), "operator")["args"]
    assert "--gpu-runtime-class=nvidia" in args


def test_the_operator_is_told_which_images_vllm_needs() -> None:
    def told(**vllm: str) -> list[str]:
        args = container(rendered_objects({"images": {"registry": "r"}, "vllm": vllm}), "operator")["args"]
        return [each for each in args if "vllm" in each]

    (by_default,) = told()
    assert by_default.startswith("--vllm-image=vllm/vllm-openai:v")
    assert by_default.rpartition(":v")[2].startswith(f"{SUPPORTED_RANGE.removesuffix('x')}"), (
        "a version that is refused"
    )
    assert told(image="") == [], "the runtime's image has both"
    own = told(image="m.example.com/vllm:1", filesImage="m.example.com/files:2")
    assert own == ["--vllm-image=m.example.com/vllm:1", "--vllm-files-image=m.example.com/files:2"]


def test_keys_and_tls_come_from_secrets() -> None:
    objects = rendered_objects(VARIANTS["secured"])
    gateway = container(objects, "gateway")
    mounts = {mount["name"]: mount["mountPath"] for mount in gateway["volumeMounts"]}
    assert f"--keys={mounts['keys']}" in gateway["args"]
    assert f"--tls-certificate={mounts['tls']}/tls.crt" in gateway["args"]
    assert found(objects, "Service", "stageline-gateway")["spec"]["ports"][0]["name"] == "https"


@pytest.mark.parametrize("kind", ["secret", "configMap"])
def test_the_authority_of_engines_is_mounted_without_any_key(kind: str) -> None:
    objects = rendered_objects({"gateway": {"engineAuthority": {f"{kind}Name": "authority"}}})
    gateway = container(objects, "gateway")
    mounts = {mount["name"]: mount for mount in gateway["volumeMounts"]}
    assert mounts["engine-authority"]["readOnly"] is True
    assert f"--engine-authority={mounts['engine-authority']['mountPath']}/ca.crt" in gateway["args"]
    pod = found(objects, "Deployment", "stageline-gateway")["spec"]["template"]["spec"]
    [volume] = [each for each in pod["volumes"] if each["name"] == "engine-authority"]
    assert volume[kind]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], "a Secret may hold the authority's key too"
    assert "--engine-authority" not in str(container(rendered_objects(), "gateway")["args"])


def test_one_replica_has_no_disruption_budget_that_would_block_a_drain() -> None:
    assert len(of_kind(rendered_objects(), "PodDisruptionBudget")) == 2
    single = {"operator": {"replicas": 1}, "gateway": {"replicas": 1}}
    assert of_kind(rendered_objects(single), "PodDisruptionBudget") == []


def test_monitors_are_rendered_only_where_they_are_known() -> None:
    kinds = ("ServiceMonitor", "PodMonitor")
    assert [each for kind in kinds for each in of_kind(rendered_objects(), kind)] == []
    objects = rendered_objects(VARIANTS["monitored"])
    monitors = [each for kind in kinds for each in of_kind(objects, kind)]
    assert len(monitors) == 3
    assert all(each["metadata"]["labels"]["release"] == "prometheus" for each in monitors)
    for monitor in of_kind(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = [each for each in of_kind(objects, "Service") if wanted <= each["metadata"]["labels"].items()]
        assert len(services) == 1, [each["metadata"]["name"] for each in services]
        ports_there = {port["name"] for port in services[0]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports_there


def test_rules_and_dashboards_are_rendered_unchanged_from_their_files(tmp_path: Path) -> None:
    chart = copy_of_chart(tmp_path)
    for folder in ("rules", "dashboards"):
        (chart / folder).mkdir(exist_ok=True)
    rule = (
        "groups:\n  - name: g\n    rules:\n      - {alert: A, expr: up == 0, annotations: {x: '{{ $labels.pod }}'}}\n"
    )
    (chart / "rules" / "own_one.yaml").write_text(rule)
    (chart / "dashboards" / "own_one.json").write_text('{"title": "{{ model }}"}\n')
    values = VARIANTS["monitored"]
    objects = rendered_objects(values, chart=chart)
    assert found(objects, "PrometheusRule", "stageline-own-one")["spec"] == yaml.safe_load(rule)
    dashboard = found(objects, "ConfigMap", "stageline-dashboard-own-one")
    assert dashboard["data"] == {"own_one.json": '{"title": "{{ model }}"}\n'}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    here = rendered_objects(values)
    assert len(of_kind(here, "PrometheusRule")) == len(list(CHART.glob("rules/*.yaml")))
    assert len(of_kind(here, "ConfigMap")) == len(list(CHART.glob("dashboards/*.json")))


def test_the_shipped_boards_come_with_the_chart_unless_they_are_not_wanted() -> None:
    address = "https://runbooks.example.com"
    boards = of_kind(rendered_objects({"monitoring": {"runbooksUrl": address}}), "ConfigMap")
    shipped = {path.name: path.read_text(encoding="utf-8").replace("/docs/runbooks", address) for path in board_paths()}
    assert {file: text for each in boards for file, text in each["data"].items()} == shipped
    assert len(shipped) >= 4
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in boards)
    assert all(len(text.encode()) < 2**20 for text in shipped.values()), "a ConfigMap holds 1 MiB"
    assert of_kind(rendered_objects({"monitoring": {"dashboards": {"enabled": False}}}), "ConfigMap") == []


def test_boards_lead_to_where_runbooks_are_served() -> None:
    objects = rendered_objects({"monitoring": {"runbooksUrl": "https://runbooks.example.com/stageline/"}})
    fleet = json.loads(found(objects, "ConfigMap", "stageline-dashboard-fleet")["data"]["fleet.json"])
    assert fleet["links"][1]["url"] == "https://runbooks.example.com/stageline/README.md"
    text = json.dumps(fleet)
    assert '"https://runbooks.example.com/stageline/${__data.fields.Alert}.md"' in text
    assert '"/docs/runbooks' not in text


def test_boards_have_no_runbook_links_without_an_address() -> None:
    for each in of_kind(rendered_objects(), "ConfigMap"):
        ((file, text),) = each["data"].items()
        shipped = next(path.read_text(encoding="utf-8") for path in board_paths() if path.name == file)
        assert "/docs/runbooks" not in text
        assert len(json.loads(text)["links"]) == len(json.loads(shipped)["links"]) - 1
        assert len(json.loads(text)["panels"]) == len(json.loads(shipped)["panels"])


def test_the_notes_say_what_to_do_next(tmp_path: Path) -> None:
    notes = rendered_files({"gateway": {"namespace": "models", "service": {"port": 8443}}})[NOTES]
    assert "\nkubectl wait -n models plm/smollm2 --for=condition=Ready" in notes
    assert "svc/stageline-gateway 8080:8443" in notes
    assert "the gateway is unauthenticated" in notes
    manifest = notes.partition("\nkubectl apply -n models -f - <<EOF\n")[2].partition("\nEOF\n")[0]
    file = tmp_path / "notes.yaml"
    file.write_text(manifest + "\n")
    assert run(["validate", str(file)]) == 0
    assert "docs/quickstart-cluster.md" in notes, "for pods that can't reach PyPI"
    assert "localhost/" in notes, "what podman and buildah call an image"
    other = rendered_files({"operator": {"namespaces": ["team-a"]}})[NOTES]
    assert "but the operator of this release only serves" in other
    several = {"operator": {"namespaces": ["a"]}, "gateway": {"namespaces": ["a", "b", "c"]}}
    assert "the gateway serves b, c, but the operator of this release only serves a." in rendered_files(several)[NOTES]
    assert (
        "operator of this release" not in rendered_files(several | {"operator": {"namespaces": ["c", "b", "a"]}})[NOTES]
    )


def test_the_notes_say_when_alerts_may_not_be_loaded() -> None:
    words = "--set monitoring.labels.release=NAME"
    assert words not in rendered_files({"monitoring": {"rules": "never"}})[NOTES]
    assert words in rendered_files({"monitoring": {"rules": "always"}})[NOTES]
    labelled = {"monitoring": {"rules": "always", "labels": {"release": "prometheus"}}}
    assert words not in rendered_files(labelled)[NOTES]


def relabelled(endpoint: dict[str, Any]) -> dict[str, str]:
    """What each label of a target becomes: a constant, or the source label it is taken from."""
    return {each["targetLabel"]: each.get("replacement") or each["sourceLabels"][0] for each in endpoint["relabelings"]}


def test_targets_get_the_labels_that_boards_and_rules_rely_on() -> None:
    objects = rendered_objects(VARIANTS["monitored"] | {"gateway": {"namespace": "models"}})
    label = "__meta_kubernetes_pod_label_stageline_dev_"
    (monitor,) = of_kind(objects, "PodMonitor")
    pod_endpoints = {each["port"]: relabelled(each) for each in monitor["spec"]["podMetricsEndpoints"]}
    release = {"release": "stageline-system/stageline"}
    of_group = {"model": f"{label}model", "group": f"{label}group"}
    assert pod_endpoints == {
        "health": {"job": "stageline-stage", **release} | of_group,
        "state": {"job": "stageline-engine", **release} | of_group,
    }
    # A label of the pod that were copied as it is called would be `stageline_dev_stage`, one called `stage` a clash.
    assert "podTargetLabels" not in monitor["spec"]
    services = {each["metadata"]["name"]: each["spec"]["endpoints"] for each in of_kind(objects, "ServiceMonitor")}
    (operator,) = services["stageline-operator"]
    assert operator["honorLabels"] is True, "its metrics name the models' namespaces themselves"
    assert relabelled(operator) == {"job": "stageline-operator", **release}
    (gateway,) = services["stageline-gateway"]
    assert relabelled(gateway) == {"job": "stageline-gateway", "namespace": "models"}
    assert gateway["honorLabels"] is True, "its metrics name the models' namespaces too"
    several = rendered_objects(VARIANTS["monitored"] | {"gateway": {"namespaces": ["a", "b"]}})
    (gateway,) = found(several, "ServiceMonitor", "stageline-gateway")["spec"]["endpoints"]
    assert relabelled(gateway) == {"job": "stageline-gateway", "namespace": NAMESPACE}, "where no model is meant"
