"""The process node as a kubelet: pods that the scheduler binds run as processes, and the cluster is told the truth."""

from pathlib import Path
from typing import Any

from cluster.api import wait_until
from cluster.api_server_outage import api_server_outage
from cluster.control_plane import NODE_LOST_SECONDS, ControlPlane
from cluster.node_pods import pod_of, python_container
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster, to_json
from processes.serving_command import alive, kill, wait_gone

SOON_SECONDS = 120.0
SLEEP = "time.sleep(600)"


class PodsInNamespace:
    """Makes pods and reads what the cluster says of them."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def create(self, pod: dict[str, Any]) -> None:
        pod["metadata"]["namespace"] = self.namespace
        response = self.cluster.api.create("Pod", pod, self.namespace)
        assert response.status_code == 201, response.text

    def get(self, name: str = "p") -> dict[str, Any]:
        return self.cluster.api.get("Pod", name, self.namespace) or {"status": {}, "gone": True}

    def until(self, what: str, holds: Any, name: str = "p", seconds: float = SOON_SECONDS) -> dict[str, Any]:
        """Wait until `holds(pod)`; returns that very pod, since the next may be another."""

        def _pod_that_holds() -> dict[str, Any] | None:
            pod = self.get(name)
            return pod if holds(pod) else None

        found = wait_until(what, _pod_that_holds, seconds, lambda: to_json(self.get(name)))
        assert found is not None
        return found

    def until_ready(self, name: str = "p") -> dict[str, Any]:
        return self.until(f"{name} is ready", lambda pod: condition(pod, "Ready") == "True", name)

    def until_gone(self, name: str = "p", seconds: float = SOON_SECONDS) -> None:
        self.until(f"{name} is gone", lambda pod: "gone" in pod, name, seconds)


def condition(pod: dict[str, Any], kind: str, field: str = "status") -> str:
    found = [each for each in pod["status"].get("conditions", []) if each["type"] == kind]
    return str(found[0].get(field, "")) if found else ""


def state(pod: dict[str, Any]) -> dict[str, Any]:
    statuses = pod["status"].get("containerStatuses", [])
    return dict(statuses[0]["state"]) if statuses else {}


def test_a_bound_pod_runs_and_its_last_words_arrive(cluster: Cluster, namespace: str, nodes: SimulatedNodes) -> None:
    pods = PodsInNamespace(cluster, namespace)
    container = python_container("open(sys.argv[1], 'w').write('no such file'); sys.exit(64)")
    container["command"] += ["/dev/termination-log"]
    pods.create(pod_of(container))
    ended = state(pods.until("the pod failed", lambda pod: pod["status"].get("phase") == "Failed"))["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (64, "Error", "no such file")
    assert pods.get()["spec"]["nodeName"] in nodes.by_name


def test_objects_and_the_pods_own_fields_reach_a_container(
    cluster: Cluster, namespace: str, nodes: SimulatedNodes
) -> None:
    """The ConfigMap comes after the pod, which waits for it as under any kubelet."""
    pods = PodsInNamespace(cluster, namespace)
    environment = [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "login", "key": "password"}}},
    ]
    container = python_container(
        "print(os.environ['IP'], os.environ['PASSWORD'], open(sys.argv[1]).read())\n" + SLEEP,
        env=environment,
        volumeMounts=[{"name": "config", "mountPath": "/etc/config"}],
    )
    container["command"] += ["/etc/config/greeting"]
    pods.create(pod_of(container, volumes=[{"name": "config", "configMap": {"name": "words"}}]))
    waits = "the pod waits for what it names"
    pods.until(waits, lambda pod: state(pod).get("waiting", {}).get("reason") == "CreateContainerConfigError")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login"}, "stringData": {"password": "s3cret"}}
    words = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "words"}, "data": {"greeting": "hello"}}
    cluster.api.create("Secret", secret, namespace)
    cluster.api.create("ConfigMap", words, namespace)
    pod = pods.until_ready()
    node = nodes.of_pod(pod)
    wanted = f"{pod['status']['podIP']} s3cret hello\n"
    wait_until("the output", lambda: node.container_log(namespace, "p", "main") == wanted, SOON_SECONDS)


def test_an_image_that_nobody_told_the_node_about_cannot_be_pulled(
    cluster: Cluster, namespace: str, nodes: SimulatedNodes
) -> None:
    pods = PodsInNamespace(cluster, namespace)
    pods.create(pod_of(python_container(SLEEP, image="example.org/unknown:1")))
    waiting = pods.until("it waits", lambda pod: state(pod).get("waiting", {}).get("reason") == "ErrImagePull")
    assert "example.org/unknown:1" in state(waiting)["waiting"]["message"]
    assert len(nodes.by_name) == 3


def test_deletion_waits_for_the_container_as_long_as_the_grace(
    cluster: Cluster, namespace: str, nodes: SimulatedNodes
) -> None:
    pods = PodsInNamespace(cluster, namespace)
    stubborn = "signal.signal(signal.SIGTERM, lambda *_: print('told to end'))\nprint('deaf')\nwhile True: " + SLEEP
    # Long enough for a busy machine to let the container hear of it.
    pods.create(pod_of(python_container(stubborn), terminationGracePeriodSeconds=6))
    node = nodes.of_pod(pods.until_ready())
    wait_until("it is deaf", lambda: "deaf" in node.container_log(namespace, "p", "main"), SOON_SECONDS)
    assert "deletionTimestamp" in cluster.api.delete("Pod", "p", namespace)["metadata"]
    pods.until_gone()
    assert "told to end" in node.container_log(namespace, "p", "main")


def test_a_pod_that_asks_for_more_devices_than_there_are_stays_pending_with_the_schedulers_words(
    cluster: Cluster, namespace: str, nodes: SimulatedNodes
) -> None:
    pods = PodsInNamespace(cluster, namespace)
    amounts = {"requests": {"nvidia.com/gpu": "9"}, "limits": {"nvidia.com/gpu": "9"}}
    pods.create(pod_of(python_container(SLEEP, resources=amounts)))
    # The scheduler may hear a moment later than we that a node is back, and then says it anew.
    words = "3 Insufficient nvidia.com/gpu"
    pending = pods.until("it says why", lambda pod: words in condition(pod, "PodScheduled", "message"))
    assert condition(pending, "PodScheduled") == "False"
    assert len(nodes.by_name) == 3


def test_pods_on_two_nodes_find_each_other_by_name(cluster: Cluster, namespace: str, nodes: SimulatedNodes) -> None:
    pods = PodsInNamespace(cluster, namespace)
    first = pod_of(python_container(SLEEP), name="first", hostname="first", subdomain="both", nodeName="node-a")
    name = f"first.both.{namespace}.svc"
    talker = python_container("print(os.environ['PEER'])\n" + SLEEP, env=[{"name": "PEER", "value": name}])
    pods.create(pod_of(talker, name="second", nodeName="node-b"))
    pods.create(first)
    address = pods.until_ready("first")["status"]["podIP"]
    pods.until_ready("second")
    node = nodes.by_name["node-b"]
    wait_until("the address", lambda: node.container_log(namespace, "second", "main") == f"{address}\n", SOON_SECONDS)


def test_a_dead_node_is_noticed_and_its_pods_are_over_when_it_is_back(
    cluster: Cluster, namespace: str, nodes: SimulatedNodes
) -> None:
    pods = PodsInNamespace(cluster, namespace)
    pods.create(pod_of(python_container(SLEEP), nodeName="node-c"))
    pods.until_ready()
    nodes.by_name["node-c"].kill()
    seconds = NODE_LOST_SECONDS + SOON_SECONDS
    pods.until("the pod counts as not ready", lambda pod: condition(pod, "Ready") == "False", seconds=seconds)
    assert not nodes.by_name["node-c"].is_ready()
    nodes.by_name["node-c"].start()
    over = pods.until("the pod is over", lambda pod: pod["status"].get("phase") == "Failed")
    assert state(over)["terminated"]["reason"] == "ContainerStatusUnknown"


def test_a_silent_nodes_containers_run_on_and_count_again_when_it_is_back(
    cluster: Cluster, namespace: str, nodes: SimulatedNodes
) -> None:
    pods = PodsInNamespace(cluster, namespace)
    pods.create(pod_of(python_container(SLEEP), nodeName="node-c"))
    pods.until_ready()
    node = nodes.by_name["node-c"]
    pid = node.container_pid(namespace, "p", python_container(SLEEP)["command"][-1])
    assert pid is not None
    node.freeze()
    seconds = NODE_LOST_SECONDS + SOON_SECONDS
    pods.until("the pod counts as not ready", lambda pod: condition(pod, "Ready") == "False", seconds=seconds)
    assert alive(pid)
    node.thaw()
    pods.until_ready()
    assert alive(pid)


def test_a_node_survives_an_absent_api_server(
    cluster: Cluster, control_plane: ControlPlane, namespace: str, nodes: SimulatedNodes, tmp_path: Path
) -> None:
    pods = PodsInNamespace(cluster, namespace)
    may_end = tmp_path / "may-end"
    waits = python_container(f"while not os.path.exists({str(may_end)!r}): time.sleep(0.05)\nsys.exit(3)")
    pods.create(pod_of(waits, name="ends-meanwhile"))
    pods.create(pod_of(python_container(SLEEP)))
    pods.until_ready()
    running = pods.until("it runs", lambda pod: "running" in state(pod), "ends-meanwhile")
    pid = nodes.of_pod(running).container_pid(namespace, "ends-meanwhile", waits["command"][-1])
    assert pid is not None
    with api_server_outage(control_plane):
        may_end.touch()
        wait_gone([pid])
    ended = pods.until("its end is told", lambda pod: pod["status"].get("phase") == "Failed", "ends-meanwhile")
    assert state(ended)["terminated"]["exitCode"] == 3
    pods.until_ready()
    cluster.api.delete("Pod", "p", namespace, grace_seconds=1)
    pods.until_gone()
    assert len(nodes.by_name) == 3


def test_a_deployments_container_is_started_again_and_may_talk_to_the_api_server(
    cluster: Cluster, namespace: str, nodes: SimulatedNodes
) -> None:
    script = "import json; print(json.load(open(os.environ['KUBECONFIG']))['users'][0]['name'])\n" + SLEEP
    template = pod_of(python_container(script))
    template["spec"] |= {"restartPolicy": "Always", "automountServiceAccountToken": True}
    labels = {"app": "talker"}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "talker"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template["spec"]},
        },
    }
    created = cluster.api.create("Deployment", deployment, namespace)
    assert created.status_code == 201, created.text
    cluster.kubectl_ok("rollout", "status", "deployment/talker", "-n", namespace, "--timeout=120s")
    (pod,) = cluster.api.list("Pod", namespace, labels)
    name, node = pod["metadata"]["name"], nodes.of_pod(pod)
    wait_until("its account", lambda: node.container_log(namespace, name, "main") == "default\n", SOON_SECONDS)
    pid = node.container_pid(namespace, name, template["spec"]["containers"][0]["command"][-1])
    assert pid is not None
    kill(pid)
    pods = PodsInNamespace(cluster, namespace)

    def _restarted(seen: dict[str, Any]) -> bool:
        (status,) = seen["status"].get("containerStatuses", [{"restartCount": 0, "state": {}}])
        return bool(status["restartCount"] == 1 and "running" in status["state"])

    pods.until("the container runs again", _restarted, name)
