"""What the README promises a person with a cluster: apply the example, wait, look, ask, delete."""

from pathlib import Path

import httpx

from cluster.api import wait_until
from cluster.model_in_cluster import READY_SECONDS, model_from_file
from cluster.operator_process import OperatorProcess
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster, column_of
from processes.gateway_process import running_gateway
from processes.serving_command import alive
from stageline_api import labels, ports

KINDS = ("Pod", "Service", "ConfigMap", "Secret", "PodDisruptionBudget", "NetworkPolicy")


def test_the_example_serves_and_leaves_nothing(
    cluster: Cluster,
    nodes: SimulatedNodes,
    operator: OperatorProcess,
    namespace: str,
    smollm2_dir: Path,
    repository: Path,
    tmp_path: Path,
) -> None:
    """The real model over two nodes. Its cache is the one that all tests share, so that it is fetched once."""
    assert operator.pid
    model = model_from_file(cluster, namespace, repository / "examples" / "smollm2.yaml", nodes)
    model.manifest["spec"]["model"]["cache"] = {"hostPath": str(smollm2_dir.parent)}
    model.apply()
    where = ("plm/smollm2", "-n", namespace)
    waited = cluster.kubectl("wait", "--for=condition=Ready", *where, f"--timeout={READY_SECONDS:g}s")
    assert waited.returncode == 0, waited.stderr + model.everything()

    table = cluster.kubectl_ok("get", *where, "-o", "wide")
    shown = {name: column_of(table, name) for name in ("READY", "DESIRED", "UP-TO-DATE", "STAGES", "REASON")}
    assert shown == {"READY": "1", "DESIRED": "1", "UP-TO-DATE": "1", "STAGES": "2", "REASON": "AllGroupsReady"}
    status = model.until("the layers are known", lambda s: all(x.get("layers") for x in s["groups"][0]["stages"]))
    stages = status["groups"][0]["stages"]
    assert stages[0]["layers"].startswith("0-")
    assert stages[1]["layers"].endswith("-29")
    assert len({stage["node"] for stage in stages}) == 2
    events = ("events", "-n", namespace, "--for", "plm/smollm2")
    wait_until("an Event tells it", lambda: "GroupReady" in cluster.kubectl_ok(*events), 120, model.everything)
    described = cluster.kubectl_ok("describe", *where)
    assert "AllGroupsReady" in described, described

    with running_gateway(cluster, namespace, tmp_path) as gateway:
        wait_until("the gateway serves", gateway.serves, 150, gateway.log_end)
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": "smollm2", "messages": [question], "temperature": 0}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
        assert "Paris" in answer["choices"][0]["message"]["content"], answer

        pod = cluster.api.get("Pod", "smollm2-0-1-0", namespace)
        assert pod is not None, model.everything()
        engine = pod["status"]["podIP"]
        ask = {"request_id": "r", "prompt": {"kind": "text", "text": "x"}}
        unkeyed = httpx.post(f"http://{engine}:{ports.ENGINE_HTTP}/v1/generate", json=ask, trust_env=False)
        assert (unkeyed.status_code, unkeyed.json()["code"]) == (401, "key_missing"), unkeyed.text
        state = httpx.get(f"http://{engine}:{ports.ENGINE_STATE}/metrics", trust_env=False)
        assert "stageline_request_queue_time_seconds_count" in state.text, state.text

    pids = [model.container_pid(stage, container) for stage, container in ((0, "stage"), (0, "engine"), (1, "stage"))]
    cluster.kubectl_ok("delete", *where, "--timeout=120s")
    selected = {labels.MODEL: "smollm2"}
    wait_until(
        "nothing of the model is left",
        lambda: not any(cluster.api.list(kind, namespace, selected) for kind in KINDS),
        200,
        model.everything,
    )
    assert [pid for pid in pids if alive(pid)] == []
