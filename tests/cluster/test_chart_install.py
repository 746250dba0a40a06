"""Helm installs the chart on a real control plane; its pods run, and a model answers through its gateway.

One release lives through the file, in order: each test starts from what the one before left. It starts from an older
chart with an older CRD. The control plane is the file's own, because Helm must find no CRD and no other operator.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import helm_python
import httpx
import pytest
import yaml

from cluster.api import wait_until
from cluster.installed_chart import AVAILABLE_SECONDS, everything, node_values, until_available
from cluster.model_in_cluster import READY_SECONDS, ModelInCluster, model_from_file
from cluster.rendered_chart import CHART, NAMESPACE, RELEASE, copy_of_chart, rendered_objects
from cluster.simulated_nodes import SimulatedNodes, running_nodes
from cluster.under_test import Cluster, own_cluster, uses_foreign_cluster
from processes.repository_files import ROOT

MODELS: Final = "models"
SECOND: Final = "more-models"
KEY: Final = "sk-chart-0123456789abcdef"
VALUES: Final = node_values(MODELS)
EVERYTHING: Final[dict[str, Any]] = {
    "commonLabels": {"team": "models"},
    "commonAnnotations": {"example.org/contact": "models"},
    "imagePullSecrets": [{"name": "registry"}],
    "operator": {"namespaces": [MODELS], "priorityClassName": "system-cluster-critical", "podLabels": {"a": "b"}},
    "gateway": {
        "namespace": MODELS,
        "keys": {"secretName": "k"},
        "tls": {"secretName": "t"},
        "service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"]},
        "extraEnv": [{"name": "STAGELINE_GATEWAY_HOLD_SECONDS", "value": "5"}],
    },
    "networkPolicy": {"clientsFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane without a CRD, with the namespaces and the keys that a person makes first."""
    if uses_foreign_cluster():
        pytest.skip("installs images that only our own nodes have")
    with own_cluster(tmp_path_factory.mktemp("chart-plane")) as found:
        enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
        keys = {"keys": [{"name": "test", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}
        found.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": enforced}},
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": MODELS}},
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "gateway-keys", "namespace": NAMESPACE},
                "stringData": {"keys.yaml": yaml.safe_dump(keys)},
            },
        )
        yield found


@pytest.fixture(scope="module")
def own_nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNodes]:
    with running_nodes(cluster, tmp_path_factory.mktemp("chart-nodes"), ("node-a", "node-b")) as found:
        found.recover()
        yield found


@pytest.fixture
def helm(cluster: Cluster) -> Iterator[helm_python.Config]:
    """Like a call of Helm's command line: it looks anew at what the cluster knows."""
    with helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as config:
        yield config


@pytest.fixture(scope="module")
def older_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as it could have been before: its CRD lacks a printer column."""
    chart = copy_of_chart(tmp_path_factory.mktemp("older"))
    (file,) = (chart / "files" / "crds").iterdir()
    crd = yaml.safe_load(file.read_text(encoding="utf-8"))
    del crd["spec"]["versions"][0]["additionalPrinterColumns"][-1]
    file.write_text(yaml.safe_dump(crd), encoding="utf-8")
    description = chart / "Chart.yaml"
    description.write_text(description.read_text(encoding="utf-8").replace("version: 0.1.0", "version: 0.0.9", 1))
    return chart


@pytest.fixture(scope="module")
def model(cluster: Cluster, own_nodes: SimulatedNodes, smollm2_dir: Path) -> ModelInCluster:
    """The example. Its cache is the one that all tests share, so that it is fetched once."""
    found = model_from_file(cluster, MODELS, ROOT / "examples" / "smollm2.yaml", own_nodes)
    found.manifest["spec"]["model"]["cache"] = {"hostPath": str(smollm2_dir.parent)}
    return found


def ask(cluster: Cluster, key: str | None = KEY, model: str = "smollm2") -> httpx.Response:
    """A question through the gateway's pod, which is where its Service would lead."""
    selector = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/instance": RELEASE}
    (pod,) = [p for p in cluster.api.list("Pod", NAMESPACE, selector) if "deletionTimestamp" not in p["metadata"]]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": model, "messages": [question], "temperature": 0, "max_tokens": 16}
    url = f"http://{pod['status']['podIP']}:8080/v1/chat/completions"
    with httpx.Client(trust_env=False, timeout=120) as client:
        return client.post(url, json=body, headers=headers)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_api_server_takes_every_object(cluster: Cluster, values: dict[str, Any]) -> None:
    objects = yaml.safe_dump_all(rendered_objects(values))
    cluster.kubectl_ok("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=objects)


def test_helm_installs_it_and_its_pods_run(
    cluster: Cluster, own_nodes: SimulatedNodes, helm: helm_python.Config, older_chart: Path
) -> None:
    """The namespace enforces the restricted profile, so a pod that needs more would not exist."""
    release = helm.install(older_chart, RELEASE, VALUES)
    assert release["status"] == "deployed", release
    until_available(cluster, own_nodes)

    def _holder() -> str:
        lease = cluster.api.get("Lease", f"{RELEASE}-operator", NAMESPACE)
        return str(lease["spec"].get("holderIdentity", "")) if lease else ""

    # A replica is ready when it has seen the cluster; it may lead a moment later.
    holder = wait_until("an operator leads", _holder, AVAILABLE_SECONDS, lambda: everything(cluster, own_nodes))
    assert holder.startswith(f"{RELEASE}-operator-"), holder


@pytest.mark.parametrize(
    ("role", "verb", "resource", "answer"),
    [
        ("edit", "create", "pipelinemodels", "yes"),
        ("edit", "patch", "pipelinemodels/scale", "yes"),
        ("edit", "patch", "pipelinemodels/status", "no"),
        ("view", "watch", "pipelinemodels", "yes"),
        ("view", "create", "pipelinemodels", "no"),
    ],
)
def test_people_with_the_clusters_own_roles_may_use_models(
    cluster: Cluster, role: str, verb: str, resource: str, answer: str
) -> None:
    binding = [f"--clusterrole={role}", f"--user=a-{role}", "-n", MODELS]
    if not cluster.kubectl("get", "rolebinding", f"a-{role}", "-n", MODELS).stdout:
        cluster.kubectl_ok("create", "rolebinding", f"a-{role}", *binding)
    plural, _, subresource = resource.partition("/")
    question = ["auth", "can-i", verb, f"{plural}.stageline.dev", f"--subresource={subresource}"]
    # The controller that gathers the roles takes a moment.
    wait_until(
        f"{role} may {verb} {resource}: {answer}",
        lambda: cluster.kubectl(*question, f"--as=a-{role}", "-n", MODELS).stdout.strip() == answer,
        AVAILABLE_SECONDS,
    )


def test_the_example_answers_through_the_charts_gateway(cluster: Cluster, model: ModelInCluster) -> None:
    """The operator and the gateway act with exactly the roles of the chart: RBAC is enforced here."""
    model.apply()
    where = (f"plm/{model.name}", "-n", MODELS)
    waited = cluster.kubectl("wait", "--for=condition=Ready", *where, f"--timeout={READY_SECONDS:g}s")
    assert waited.returncode == 0, waited.stderr + model.everything()
    assert model.status()["url"] == f"http://{RELEASE}-gateway.{NAMESPACE}.svc:80/v1"
    assert ask(cluster, key=None).status_code == 401
    wait_until("the gateway knows the model", lambda: ask(cluster).is_success, AVAILABLE_SECONDS, model.everything)
    answer = ask(cluster).json()
    assert "Paris" in answer["choices"][0]["message"]["content"], answer


def test_an_upgrade_brings_the_new_crd_and_restarts_no_group(
    cluster: Cluster, own_nodes: SimulatedNodes, helm: helm_python.Config, model: ModelInCluster
) -> None:
    before = model.pod_uids()
    uid, generation = model.get()["metadata"]["uid"], model.get()["metadata"]["generation"]
    old_columns = cluster.kubectl_ok("get", "crd", "pipelinemodels.stageline.dev", "-o", "json")
    runtime = {"repository": "stageline", "tag": "a-newer-one"}
    operators = {pod["metadata"]["uid"] for pod in operator_pods(cluster)}
    helm.upgrade(CHART, RELEASE, VALUES | {"images": VALUES["images"] | {"runtime": runtime}})
    until_available(cluster, own_nodes)
    wait_until(
        "the operator's pods are new ones",
        lambda: not operators & {pod["metadata"]["uid"] for pod in operator_pods(cluster)},
        AVAILABLE_SECONDS,
        lambda: everything(cluster, own_nodes),
    )
    assert printer_columns(cluster) == columns_of(old_columns) + 1
    model.cluster.kubectl_ok("annotate", "plm", model.name, "-n", MODELS, "--overwrite", "seen=by-the-new-operator")
    model.until_ready(seconds=AVAILABLE_SECONDS)
    assert model.pod_uids() == before, model.everything()
    assert (model.get()["metadata"]["uid"], model.get()["metadata"]["generation"]) == (uid, generation)


def test_a_rollback_takes_back_operator_and_crd_and_restarts_no_group(
    cluster: Cluster, own_nodes: SimulatedNodes, helm: helm_python.Config, model: ModelInCluster
) -> None:
    before, spec, columns = model.pod_uids(), model.get()["spec"], printer_columns(cluster)
    operators = {pod["metadata"]["uid"] for pod in operator_pods(cluster)}
    helm.rollback(RELEASE)
    wait_until(
        "the operator's pods are new ones",
        lambda: not operators & {pod["metadata"]["uid"] for pod in operator_pods(cluster)},
        AVAILABLE_SECONDS,
        lambda: everything(cluster, own_nodes),
    )
    until_available(cluster, own_nodes)
    assert printer_columns(cluster) == columns - 1
    model.cluster.kubectl_ok("annotate", "plm", model.name, "-n", MODELS, "--overwrite", "seen=by-the-old-operator")
    model.until_ready(seconds=AVAILABLE_SECONDS)
    assert model.pod_uids() == before, model.everything()
    assert model.get()["spec"] == spec
    assert ask(cluster).is_success


def test_monitors_appear_where_the_cluster_knows_them(cluster: Cluster, helm: helm_python.Config) -> None:
    assert "monitoring.coreos.com" not in helm.status(RELEASE)["manifest"]
    cluster.apply(*(monitoring_crd(kind) for kind in ("ServiceMonitor", "PodMonitor")))
    # Established is what the API server writes down just before it tells who asks what it knows.
    known = ("api-resources", "--cached=false", "--api-group=monitoring.coreos.com", "-o", "name")
    wait_until("the kinds are told", lambda: len(cluster.kubectl(*known).stdout.split()) == 2, AVAILABLE_SECONDS)
    helm.upgrade(CHART, RELEASE, VALUES)
    listed = cluster.kubectl_ok("get", "servicemonitors,podmonitors", "-n", NAMESPACE, "-o", "name").split()
    assert len(listed) == 3, listed


def test_upgrades_give_the_gateway_a_second_namespace_and_take_it_away_again(
    cluster: Cluster, own_nodes: SimulatedNodes, helm: helm_python.Config, model: ModelInCluster
) -> None:
    """There is a model of the same name in the other one; that it has no group is no matter."""
    before, namesake = model.pod_uids(), {"metadata": {"name": model.name, "namespace": SECOND}}
    spec = {name: value for name, value in model.manifest["spec"].items() if name != "autoscaling"} | {"replicas": 0}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SECOND}},
        model.manifest | namesake | {"spec": spec},
    )
    gateway = {name: value for name, value in VALUES["gateway"].items() if name != "namespace"}
    helm.upgrade(CHART, RELEASE, VALUES | {"gateway": gateway | {"namespaces": [MODELS, SECOND]}})
    until_available(cluster, own_nodes)

    def shown() -> str:
        return everything(cluster, own_nodes)

    def refused() -> str:
        said = ask(cluster)
        return said.text if said.status_code == 400 else ""

    words = wait_until("both are known", refused, AVAILABLE_SECONDS, shown)
    assert f"'{MODELS}/smollm2' or '{SECOND}/smollm2'" in words
    assert ask(cluster, model=f"{MODELS}/smollm2").is_success
    url = f"http://{RELEASE}-gateway.{NAMESPACE}.svc:80/v1"

    def url_there() -> str:
        return str(((cluster.api.get("PipelineModel", model.name, SECOND) or {}).get("status") or {}).get("url"))

    wait_until("the other's status says where", lambda: url_there() == url, AVAILABLE_SECONDS, shown)
    roles = ("get", "roles,rolebindings", "-n", SECOND, "-o", "name")
    assert len(cluster.kubectl_ok(*roles).split()) == 2

    helm.upgrade(CHART, RELEASE, VALUES)
    until_available(cluster, own_nodes)
    wait_until("the name is one model's again", lambda: ask(cluster).is_success, AVAILABLE_SECONDS, shown)
    assert cluster.kubectl_ok(*roles).split() == []
    assert model.pod_uids() == before
    cluster.kubectl_ok("delete", "namespace", SECOND, "--wait=false")


def test_an_operator_of_some_namespaces_needs_no_right_outside_them(
    cluster: Cluster, own_nodes: SimulatedNodes, helm: helm_python.Config, model: ModelInCluster
) -> None:
    helm.upgrade(
        CHART, RELEASE, VALUES | {"operator": VALUES["operator"] | {"namespaces": [MODELS], "watchNodes": False}}
    )
    until_available(cluster, own_nodes)
    cluster_wide = "app.kubernetes.io/component=operator"
    assert not cluster.kubectl_ok("get", "clusterroles,clusterrolebindings", "-l", cluster_wide, "-o", "name")
    before = model.pod_uids()
    model.apply(restart={"backoffSeconds": 2})
    model.until_ready(seconds=AVAILABLE_SECONDS)
    assert model.pod_uids() == before


def test_uninstalling_leaves_models_and_the_crd(
    cluster: Cluster, own_nodes: SimulatedNodes, helm: helm_python.Config, model: ModelInCluster
) -> None:
    before, uid = model.pod_uids(), model.get()["metadata"]["uid"]
    helm.uninstall(RELEASE)
    wait_until(
        "the release's pods are gone",
        lambda: not cluster.api.list("Pod", NAMESPACE),
        AVAILABLE_SECONDS,
        lambda: everything(cluster, own_nodes),
    )
    assert model.get()["metadata"]["uid"] == uid
    assert model.pod_uids() == before
    kinds = "deployments,services,roles,rolebindings,serviceaccounts,networkpolicies,poddisruptionbudgets"
    left = cluster.kubectl_ok("get", kinds, "-n", NAMESPACE, "-l", "app.kubernetes.io/part-of=stageline", "-o", "name")
    assert not left.split()
    assert not cluster.kubectl_ok("get", "clusterroles", "-l", "app.kubernetes.io/part-of=stageline", "-o", "name")
    # The CRD that stayed is no obstacle to the next installation.
    assert helm.install(CHART, RELEASE, VALUES, dry_run="server")["name"] == RELEASE


def operator_pods(cluster: Cluster) -> list[dict[str, Any]]:
    """Pods of the operator's Deployment."""
    return cluster.api.list("Pod", NAMESPACE, {"app.kubernetes.io/component": "operator"})


def columns_of(crd: str) -> int:
    """How many printer columns a CRD has."""
    return len(yaml.safe_load(crd)["spec"]["versions"][0]["additionalPrinterColumns"])


def printer_columns(cluster: Cluster) -> int:
    """How many the cluster's CRD has now."""
    return columns_of(cluster.kubectl_ok("get", "crd", "pipelinemodels.stageline.dev", "-o", "json"))


def monitoring_crd(kind: str) -> dict[str, Any]:
    """A CRD of that name: enough for Helm to see that the cluster knows the kind. It checks no field."""
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "scope": "Namespaced",
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }
