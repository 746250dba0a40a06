"""`network.tls` on a real control plane: the Secret is waited for and mounted, and answers come by TLS alone."""

import base64
from pathlib import Path

import httpx
import pytest
import trustme

from cluster.api import wait_until
from cluster.model_in_cluster import small_model
from cluster.operator_process import OperatorProcess
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster
from processes.gateway_process import running_gateway
from processes.model_certificates import write_certificates
from stageline_api import ports

SOON_SECONDS = 180.0


def test_a_model_waits_for_its_certificate_and_then_answers_by_tls(
    cluster: Cluster,
    nodes: SimulatedNodes,
    operator: OperatorProcess,
    namespace: str,
    tiny_llama_dir: Path,
    tmp_path: Path,
) -> None:
    assert operator.pid
    model = small_model(cluster, namespace, tiny_llama_dir, nodes)
    model.apply(network={"tls": {"secretName": "certificates"}})
    model.until(
        "what is missing is named",
        lambda _: "certificates" in model.condition("Ready").get("message", ""),
        SOON_SECONDS,
    )
    assert model.condition("Ready")["reason"] == "NotStarted", model.everything()

    authority = trustme.CA()
    files = Path(write_certificates(tmp_path, authority, f"{model.name}-stages.{namespace}.svc").directory)
    data = {name: base64.b64encode((files / name).read_bytes()).decode() for name in ("tls.crt", "tls.key", "ca.crt")}
    metadata = {"name": "certificates", "namespace": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "kubernetes.io/tls", "data": data}
    )
    model.until_ready()

    options = ("--engine-authority", str(files / "ca.crt"))
    with running_gateway(cluster, namespace, tmp_path, options=options) as gateway:
        wait_until("the gateway serves", gateway.serves, 150, gateway.log_end)
        body = {"model": model.name, "prompt": "a", "max_tokens": 3}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3), answer.text
    pods = {pod["metadata"]["labels"]["stageline.dev/stage"]: pod for pod in model.pods()}
    engine = pods["0"]["status"]["podIP"]
    assert httpx.get(f"http://{engine}:{ports.ENGINE_STATE}/readyz", trust_env=False).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{engine}:{ports.ENGINE_HTTP}/readyz", trust_env=False)
