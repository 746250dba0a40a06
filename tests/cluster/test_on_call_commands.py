"""`stageline status`, `top` and `debug-bundle` of a real cluster, with the rights of somebody who may look and no more.

Pods have loopback addresses here, to which an API server lends no proxy: so they are asked directly, and the refusal of
the proxy is what the default shows.
"""

import json
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.model_in_cluster import ModelInCluster
from cluster.under_test import Cluster
from processes.serving_command import kill, run_stageline

PLANTED = "planted-key-of-a-cluster-1"
ACCOUNT = "on-call"
RBAC = "rbac.authorization.k8s.io"
Bundle = tuple[dict[str, str], str]
"""Texts by name, and what was said while they were gathered."""


@pytest.fixture(scope="module")
def shared_spec() -> dict[str, Any]:
    """A secret in a variable."""
    return {"template": {"env": [{"name": "MY_API_KEY", "value": PLANTED}]}}


@pytest.fixture(scope="module")
def kubeconfig(cluster: Cluster, shared_namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an account with the role `view`, the right to use the proxy, and the right to read PipelineModels."""
    metadata = {"name": ACCOUNT, "namespace": shared_namespace}
    role = {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": metadata}
    rules = [
        {"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]},
        {"apiGroups": ["stageline.dev"], "resources": ["pipelinemodels"], "verbs": ["get", "list"]},
    ]
    subjects = [{"kind": "ServiceAccount", **metadata}]
    own = {"apiGroup": RBAC, "kind": "Role", "name": ACCOUNT}
    view = {"apiGroup": RBAC, "kind": "ClusterRole", "name": "view"}
    binding = {"apiVersion": f"{RBAC}/v1", "kind": "RoleBinding", "subjects": subjects}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        role | {"rules": rules},
        binding | {"metadata": metadata, "roleRef": own},
        binding | {"metadata": metadata | {"name": f"{ACCOUNT}-view"}, "roleRef": view},
    )
    return cluster.service_account_kubeconfig(shared_namespace, ACCOUNT, tmp_path_factory.mktemp("on-call"))


def facts_of(model: ModelInCluster, kubeconfig: Path, *options: str) -> dict[str, Any]:
    """What `stageline status` says in JSON."""
    where = ("--kubeconfig", str(kubeconfig), "--namespace", model.namespace)
    done = run_stageline("status", model.name, "--output", "json", *where, *options)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_model_s_groups_and_stages_are_told_and_asked(model: ModelInCluster, kubeconfig: Path) -> None:
    def _knows_layers() -> bool:
        return all(stage.get("layers") for stage in model.status()["groups"][0]["stages"])

    wait_until("the layers are known", _knows_layers, 150, model.everything)

    def _everyone_answered() -> dict[str, Any]:
        # Who takes longer than a person would wait is passed over, as any process does on a busy machine.
        told = facts_of(model, kubeconfig, "--reach", "direct")
        (group,) = told["models"][0]["groups"]
        answers = [group["engine"], *(each[part] for each in group["stages"] for part in ("activity", "memory_bytes"))]
        return told if None not in answers else {}

    told = wait_until("all answered in time", _everyone_answered, 150, model.everything)
    assert model.namespace in told["where"]
    (found,) = told["models"]
    assert (found["health"], found["ready_groups"], found["groups"][0]["phase"]) == ("Healthy", 1, "Ready"), told
    stages = found["groups"][0]["stages"]
    assert [stage["pod"] for stage in stages] == [model.pod(index)["metadata"]["name"] for index in range(len(stages))]
    for stage in stages:
        assert stage["node"].startswith("node-"), told
        assert stage["memory_bytes"] > 0, told
        did = stage["activity"]
        assert did["busy_share"] + did["wait_share"] + did["idle_share"] == pytest.approx(1, abs=0.01), told
    assert found["groups"][0]["engine"]["requests_running"] == 0, told


def test_what_the_api_server_s_proxy_refuses_is_said_and_the_objects_still_tell(
    model: ModelInCluster, kubeconfig: Path
) -> None:
    told = facts_of(model, kubeconfig)
    (found,) = told["models"]
    assert found["health"] == "Healthy"
    assert found["groups"][0]["stages"][0]["activity"] is None
    assert any("through the API server: status " in problem for problem in told["problems"]), told["problems"]


def test_top_draws_the_stages(model: ModelInCluster, kubeconfig: Path) -> None:
    where = ("--kubeconfig", str(kubeconfig), "-n", model.namespace, "--reach", "direct")

    def _frame() -> str:
        done = run_stageline("top", model.name, "--once", "--interval", "0.5", *where)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # A heartbeat that falls into the interval takes its part of the bar.
    wait_until("a stage that was idle all the time", lambda: "·" * 40 in _frame(), 120, _frame)


def test_a_bundle_holds_what_the_cluster_keeps_of_a_failure_and_no_secret(
    model: ModelInCluster, kubeconfig: Path, tmp_path: Path
) -> None:
    before = model.incarnation()
    kill(model.container_pid(1, "stage"))
    model.until_incarnation(before)
    first = model.pod(0)["metadata"]["name"]
    asked = {f"metrics/{first}.stage.prom", "traces/group-0.json"}

    def _bundle() -> Bundle | None:
        # Who takes longer than a person would wait is passed over, as any process does on a busy machine.
        found = bundle_of(model, kubeconfig, tmp_path / f"{time.monotonic_ns()}.tar.gz")
        return found if asked <= found[0].keys() else None

    found = wait_until("a bundle with all answers", _bundle, 150, model.everything)
    assert found is not None
    files, said = found
    assert "failureClass: Killed" in files["last-words/failures.yaml"]
    for reason in ("GroupFailed", "Scheduled"):
        assert f"reason: {reason}" in files["events.yaml"], files["events.yaml"]
    assert "MY_API_KEY" in files[f"pods/{first}.yaml"]
    assert "stageline_stage_busy_seconds_total" in files[f"metrics/{first}.stage.prom"]
    assert "traceEvents" in files["traces/group-0.json"]
    assert any(name.startswith("objects/configmap-") for name in files)
    assert "gitVersion" in files["versions/kubernetes.yaml"]
    assert f"missing logs/{first}/stage.log: status " in said, "nodes of this test serve no logs"
    assert "missing components: " in said, "the account may not look into all namespaces"
    token = json.loads(kubeconfig.read_text())["users"][0]["user"]["token"]
    assert [name for name, text in files.items() if PLANTED in text or token in text] == []


def bundle_of(model: ModelInCluster, kubeconfig: Path, archive: Path) -> Bundle:
    """What `stageline debug-bundle` gathers."""
    where = ("--kubeconfig", str(kubeconfig), "-n", model.namespace, "--reach", "direct")
    done = run_stageline("debug-bundle", model.name, "--trace-seconds", "0.5", "--output", str(archive), *where)
    assert done.returncode == 0, done.stderr
    with tarfile.open(archive) as opened:
        read = {each.name.partition("/")[2]: opened.extractfile(each) for each in opened}
        return {name: content.read().decode() for name, content in read.items() if content is not None}, done.stderr
