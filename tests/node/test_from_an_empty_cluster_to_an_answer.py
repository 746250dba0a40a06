"""From an empty cluster to an answer, as `docs/quickstart-cluster.md` goes there, and then bad days of every kind.

One release and one model live through the file, in order: each test starts from what the one before left. Namespaces
are under the restricted profile. What took how long is told at the end of the run.
"""

import json
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import helm_python
import httpx
import pytest
import yaml

from cluster.api import wait_until
from cluster.model_in_cluster import ModelInCluster
from cluster.rendered_chart import CHART, NAMESPACE, RELEASE
from node.durations import Durations
from node.real_cluster import RealCluster
from node.real_node import RealNode
from processes import page_commands
from processes.repository_files import ROOT

REGISTRY: Final = "stageline.test"
READY_SECONDS: Final = 240.0
NODE_LOST_SECONDS: Final = 50.0
"""Kubernetes' own grace for a node that is silent."""
QUESTION: Final = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Final = [{"role": "user", "content": "Write a very long story about a ship."}]


@pytest.fixture(scope="module")
def namespace(real: RealCluster) -> str:
    """Where release and models are, which admits what the restricted profile admits and nothing else."""
    enforced = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    real.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": enforced}})
    return NAMESPACE


@pytest.fixture(scope="module")
def model(real: RealCluster, namespace: str) -> ModelInCluster:
    manifest = yaml.safe_load((ROOT / "examples" / "air_gapped" / "smollm2.yaml").read_text(encoding="utf-8"))
    manifest["metadata"]["namespace"] = namespace
    return ModelInCluster(real.cluster, namespace, "smollm2", None, manifest)


@pytest.fixture
def helm(real: RealCluster) -> Iterator[helm_python.Config]:
    with helm_python.Config(kubeconfig_path=real.cluster.kubeconfig, namespace=NAMESPACE) as config:
        yield config


def ask(real: RealCluster, name: str = "smollm2", seconds: float = 60.0) -> httpx.Response:
    """A question through the gateway's Service, by its ClusterIP."""
    body = {"model": name, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
    return httpx.post(f"{gateway(real)}/v1/chat/completions", json=body, timeout=seconds, trust_env=False)


def until_answered(real: RealCluster) -> None:
    """Until the gateway's Service leads somewhere, and a question is answered."""

    def _is_answered() -> bool:
        try:
            return ask(real).status_code == 200
        except httpx.TransportError:
            return False

    wait_until("the gateway answers", _is_answered, READY_SECONDS)


def gateway(real: RealCluster) -> str:
    service = real.cluster.api.get("Service", f"{RELEASE}-gateway", NAMESPACE)
    assert service is not None
    return f"http://{service['spec']['clusterIP']}"


def story(real: RealCluster, tokens: int) -> Iterator[str]:
    """The words of a long streamed answer, chunk by chunk, and `[DONE]` at the end."""
    body = {"model": "smollm2", "messages": STORY, "temperature": 0, "max_tokens": tokens, "stream": True}
    url = f"{gateway(real)}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=240, trust_env=False) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                yield data
            elif data and data != line:
                yield json.loads(data)["choices"][0]["delta"].get("content", "")


def answers(real: RealCluster, name: str = "smollm2") -> None:
    found = ask(real, name)
    assert found.status_code == 200, found.text
    assert "Paris" in found.json()["choices"][0]["message"]["content"]


def failures(model: ModelInCluster) -> list[dict[str, Any]]:
    return list(model.status().get("lastFailures", []))


def recorded(model: ModelInCluster, failure_class: str, seconds: float = READY_SECONDS) -> dict[str, Any]:
    """The failure of a class that the model's status names; on a timeout, all that it names."""

    def _look() -> dict[str, Any] | None:
        return next((each for each in failures(model) if each["failureClass"] == failure_class), None)

    found = wait_until(f"{failure_class} on the CR", _look, seconds, model.everything)
    assert found is not None
    return found


def replaced(model: ModelInCluster, incarnation: int) -> None:
    model.until_incarnation(above=incarnation, seconds=READY_SECONDS)
    model.until_ready(seconds=READY_SECONDS)


def documented(section: str, words: Mapping[str, str]) -> list[str]:
    """The commands of a section of the quick start but Stageline's own, with some words replaced."""
    text = (ROOT / "docs" / "quickstart-cluster.md").read_text(encoding="utf-8").split(f"## {section}\n")[1]
    block = text.split("```sh\n")[1].split("```")[0]
    commands = [line for line in block.splitlines() if line.startswith(("kubectl ", "sed "))]
    for name, word in words.items():
        commands = [command.replace(name, word) for command in commands]
    return commands


def type_in(real: RealCluster, command: str) -> None:
    program, *words = shlex.split(command)
    if program == "kubectl":
        real.cluster.kubectl_ok(*words)
    else:
        subprocess.run([program, *words], check=True)


def test_the_chart_comes_up_under_the_restricted_profile(
    real: RealCluster, namespace: str, helm: helm_python.Config, durations: Durations
) -> None:
    with durations.of("helm install until operator and gateway are there"):
        helm.install(CHART, RELEASE, {"images": {"registry": REGISTRY}})
        for name in ("operator", "gateway"):
            what = f"deployment/{RELEASE}-{name}"
            real.cluster.kubectl_ok("rollout", "status", what, "-n", namespace, "--timeout=240s")
    warnings = [each for each in real.cluster.api.list("Event", namespace) if "PodSecurity" in str(each)]
    assert not warnings, warnings


def test_a_model_brought_by_the_documented_commands_answers(
    real: RealCluster, model: ModelInCluster, smollm2_dir: Path, tmp_path: Path, durations: Durations
) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", examples)
    real.cluster.apply(volume(tmp_path))
    here = {"models/HASH": str(smollm2_dir), "examples/": f"{examples}/", page_commands.REGISTRY: REGISTRY}
    *commands, apply = documented("Without the internet", here)
    for command in commands:
        type_in(real, command)
    with durations.of("kubectl apply until a model of two stages is Ready"):
        type_in(real, apply)
        model.until_ready(seconds=READY_SECONDS)
    answers(real)
    nodes = {pod["spec"]["nodeName"] for pod in model.pods()}
    assert len(nodes) == 2, f"a stage on each node: {model.everything()}"


def volume(directory: Path) -> dict[str, Any]:
    """A volume for the claim: a directory that the stage pods' user may write, on what both nodes have in common."""
    folder = directory / "volume"
    folder.mkdir()
    subprocess.run(["chown", "10001:10001", str(folder)], check=True)
    # pytest's directories are for their owner alone.
    for parent in folder.parents[:3]:
        parent.chmod(0o755)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "models"},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": NAMESPACE, "name": "models"},
        },
    }


def test_a_stream_goes_on_over_a_killed_stage(real: RealCluster, model: ModelInCluster, durations: Durations) -> None:
    """In float32, in which it goes on token for token; in the model's bfloat16 a near tie may fall the other way."""
    before = model.incarnation()
    change = {"engine": {"dtype": "float32"}, "rollout": {"maxSurge": 0, "maxUnavailable": 1}}
    real.cluster.api.patch("PipelineModel", "smollm2", {"spec": change}, NAMESPACE)
    replaced(model, before)
    undisturbed = list(story(real, 200))
    assert undisturbed[-1] == "[DONE]"
    incarnation, seen = model.incarnation(), list[str]()
    under_way = threading.Event()

    def _read() -> None:
        for chunk in story(real, 200):
            seen.append(chunk)
            if len(seen) == 20:
                under_way.set()

    reader = threading.Thread(target=_read)
    reader.start()
    assert under_way.wait(60), seen
    pod = model.pod(stage=1)
    with durations.of("a stage killed until the model is Ready again"):
        real.node_of(pod).kill_container(pod, "stage")
        replaced(model, incarnation)
    reader.join(240)
    assert "".join(seen) == "".join(undisturbed)
    failure = recorded(model, "Killed")
    assert (failure["stage"], failure["exitCode"]) == (1, 137), failure


def test_a_deleted_pod_comes_back_with_its_group(
    real: RealCluster, model: ModelInCluster, durations: Durations
) -> None:
    incarnation = model.incarnation()
    name = model.pod(stage=0)["metadata"]["name"]
    with durations.of("a pod deleted until the model is Ready again"):
        real.cluster.kubectl_ok("delete", "pod", name, "-n", NAMESPACE, "--wait=false")
        replaced(model, incarnation)
    answers(real)


def other_model(model: ModelInCluster, name: str, **spec: Any) -> ModelInCluster:
    """Another model from the same claim, in one stage."""
    body = {**model.manifest["spec"], "parallelism": {"pipeline": 1}, **spec}
    manifest = {**model.manifest, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": body}
    return ModelInCluster(model.cluster, NAMESPACE, name, None, manifest)


def test_a_stage_over_its_memory_limit_says_so(real: RealCluster, model: ModelInCluster) -> None:
    greedy = other_model(model, "greedy", template={"resources": {"limits": {"memory": "300Mi"}}})
    greedy.apply()
    assert recorded(greedy, "OOMKilled")["stage"] == 0
    real.cluster.kubectl_ok("delete", "plm", "greedy", "-n", NAMESPACE)
    answers(real)


def test_an_image_that_is_nowhere_is_named(real: RealCluster, model: ModelInCluster) -> None:
    lost = other_model(model, "lost", template={"image": "registry.invalid/none:1"})
    lost.apply()
    said = lost.until("the image is named", lambda status: "registry.invalid/none:1" in str(status.get("conditions")))
    assert any(each["status"] == "False" and each["type"] == "Ready" for each in said["conditions"]), said
    assert "ImagePull" in str(said) or "ErrImagePull" in str(said), said
    real.cluster.kubectl_ok("delete", "plm", "lost", "-n", NAMESPACE)


def test_a_drained_node_is_left_and_the_model_answers(
    real: RealCluster, model: ModelInCluster, durations: Durations
) -> None:
    incarnation = model.incarnation()
    node = real.node_of(model.pod(stage=1)).name
    try:
        with durations.of("kubectl drain until the model is Ready elsewhere"):
            real.cluster.kubectl_ok(
                "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s", "--force"
            )
            replaced(model, incarnation)
        assert {pod["spec"]["nodeName"] for pod in model.pods()} == {each.name for each in real.nodes} - {node}
        until_answered(real)
        answers(real)
    finally:
        real.cluster.kubectl_ok("uncordon", node)


def test_a_silent_kubelet_is_a_lost_node(real: RealCluster, model: ModelInCluster, durations: Durations) -> None:
    incarnation = model.incarnation()
    node = real.node_of(model.pod(stage=0))
    node.stop("kubelet")
    try:
        with durations.of("a kubelet stopped until the model is Ready elsewhere"):
            failure = recorded(model, "NodeLost", NODE_LOST_SECONDS + READY_SECONDS)
            replaced(model, incarnation)
        assert failure["stage"] == 0, failure
        assert node.name in failure["message"], failure
        assert node.name not in {pod["spec"]["nodeName"] for pod in model.pods()}
        until_answered(real)
    finally:
        node.start_kubelet()
    real.until_ready(node)
    answers(real)
    living = {pod["metadata"]["uid"] for pod in real.cluster.api.list("Pod")}
    wait_until("the node ends what was lost with it", lambda: pods_on(node) <= living, 120, str)


def pods_on(node: RealNode) -> set[str]:
    """Uids of the pods whose containers run on a node, whatever the cluster thinks of it."""
    tasks = (line.split() for line in node.ctr("tasks", "list").splitlines()[1:])
    running = [task for task, _, state in tasks if state == "RUNNING"]
    found = (json.loads(node.ctr("containers", "info", each)) for each in running)
    return {str(each["Labels"]["io.kubernetes.pod.uid"]) for each in found}


def test_a_suspended_model_says_so_to_who_asks(real: RealCluster, model: ModelInCluster) -> None:
    model.apply(suspend=True)
    wait_until("no pods are left", lambda: not model.pods(), READY_SECONDS, model.everything)
    wait_until("the gateway knows", lambda: ask(real).status_code != 200, 60)
    refused = ask(real)
    assert refused.status_code in (404, 503), refused.text
    assert "suspend" in refused.text, refused.text
    model.apply(suspend=False)
    model.until_ready(seconds=READY_SECONDS)
    answers(real)


def test_uninstalling_leaves_nothing_but_what_it_says(
    real: RealCluster, model: ModelInCluster, helm: helm_python.Config, durations: Durations
) -> None:
    with durations.of("a model deleted until nothing of it is left"):
        real.cluster.kubectl_ok("delete", "plm", "smollm2", "-n", NAMESPACE, "--timeout=180s")
        wait_until("no pod of it is left", lambda: not model.pods(), 120, model.everything)
    helm.uninstall(RELEASE)
    lease = f"lease.coordination.k8s.io/{RELEASE}-operator"
    kinds = "deployments,pods,services,configmaps,secrets,poddisruptionbudgets,networkpolicies,serviceaccounts,leases"

    def _left() -> list[str]:
        names = real.cluster.kubectl_ok("get", kinds, "-n", NAMESPACE, "-o", "name").split()
        return [each for each in names if each not in ("configmap/kube-root-ca.crt", "serviceaccount/default")]

    wait_until("nothing is left but the Lease", lambda: _left() == [lease], 120, _left)
    crds = real.cluster.kubectl_ok("get", "crds", "-o", "name")
    assert "pipelinemodels.stageline.dev" in crds, "crds.keep is on by default"


def test_network_policies_keep_others_out() -> None:
    pytest.skip("Debian has no network plugin that enforces NetworkPolicies, and no other can be had here")
