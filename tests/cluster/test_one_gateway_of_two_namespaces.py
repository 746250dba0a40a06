"""A gateway that serves two namespaces of a real control plane, by the roles that the chart makes and no others."""

import base64
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import create_model, operator_replica
from cluster.rendered_chart import rendered_objects
from cluster.under_test import Cluster, to_json, uses_foreign_cluster
from processes.gateway_process import ACCOUNT, GatewayProcess, running_gateway
from processes.scripted_engine import ScriptedEngine, answer
from stageline_api.engine_access import KEYS_ENTRY, KEYS_SECRET
from stageline_local.node.addresses import AddressPool

SOON_SECONDS = 180.0
ASK_SECONDS = 20.0
MAY = {
    ("get", f"secrets/{KEYS_SECRET}"): "yes", ("get", "secrets/other"): "no", ("list", "secrets"): "no",
    ("watch", "pods"): "yes", ("list", "pipelinemodels.stageline.dev"): "yes", ("delete", "pods"): "no",
    ("patch", "pipelinemodels.stageline.dev"): "no",
}  # fmt: skip


def grant(cluster: Cluster, system: str, namespaces: list[str]) -> None:
    """What the chart grants a gateway of these namespaces that runs in `system`."""
    values = {"gateway": {"namespaces": namespaces}, "operator": {"enabled": False}, "crds": {"install": False}}
    objects = rendered_objects(values, name="stageline", namespace=system)
    wanted = [each for each in objects if each["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
    assert len(wanted) == 1 + 2 * len(namespaces), [each["kind"] for each in objects]
    cluster.apply(*wanted)


def may(cluster: Cluster, system: str, namespace: str) -> dict[tuple[str, str], str]:
    account = f"--as=system:serviceaccount:{system}:{ACCOUNT}"
    return {asked: cluster.kubectl("auth", "can-i", *asked, account, "-n", namespace).stdout.strip() for asked in MAY}


@contextmanager
def engine_of(cluster: Cluster, namespace: str, kubelet: InstantKubelet) -> Iterator[ScriptedEngine]:
    """An engine where the model's pod of stage 0 is, which takes what the operator's Secret holds and nothing else."""
    secret = wait_until(
        f"the operator has written {namespace}'s keys", lambda: cluster.api.get("Secret", KEYS_SECRET, namespace),
        SOON_SECONDS, lambda: to_json(cluster.api.get("PipelineModel", "tiny", namespace)),
    )  # fmt: skip
    assert secret is not None
    lease = AddressPool().lease()
    key = base64.b64decode(secret["data"][KEYS_ENTRY]).decode().strip()
    engine = ScriptedEngine(lambda _: answer(f"from {namespace}"), keys=(key,), address=lease.address, port=8000)
    engine.start()
    kubelet.engine_addresses[namespace] = lease.address
    try:
        yield engine
    finally:
        engine.stop()
        lease.release()


def ask(gateway: GatewayProcess, model: str) -> tuple[int, Mapping[str, Any]]:
    body = {"model": model, "prompt": "x"}
    try:
        answered = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=ASK_SECONDS, trust_env=False)
    except httpx.ReadTimeout:  # a request waits for its group for longer than the test asks
        return 504, {}
    return answered.status_code, answered.json()


def text_of(gateway: GatewayProcess, model: str) -> str:
    status, answered = ask(gateway, model)
    return str(answered["choices"][0]["text"]) if status == 200 else f"{status} {answered}"


def test_each_namespace_gives_it_a_role_and_a_key_and_one_without_a_role_hinders_no_other(
    cluster: Cluster, namespace: str, other_namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    if uses_foreign_cluster():
        pytest.skip("engines are on loopback addresses of this machine")
    first, other = namespace, other_namespace
    grant(cluster, first, [first])
    assert (may(cluster, first, first), set(may(cluster, first, other).values())) == (MAY, {"no"})

    with ExitStack() as stack:
        served = ("--namespace", f"{first},{other}", "--no-leader-elect")
        operator = stack.enter_context(operator_replica(cluster.kubeconfig, tmp_path / "operator", *served))
        for each in (first, other):
            create_model(cluster.api, each, "tiny", kubelet.template)
        for each in (first, other):
            stack.enter_context(engine_of(cluster, each, kubelet))
        gateway = stack.enter_context(running_gateway(cluster, first, tmp_path, serves=f"{first},{other}"))

        def shown() -> str:
            return f"{gateway.ask_admin('/status').text}\n{gateway.log_end()}\n{operator.log()[-2000:]}"

        def served_by(model: str, text: str) -> None:
            wait_until(f"{model} answers", lambda: text_of(gateway, model) == text, SOON_SECONDS, shown)

        served_by("tiny", f"from {first}")
        wait_until("it takes clients", lambda: gateway.ask_admin("/accepting").status_code == 200, SOON_SECONDS, shown)
        (problem,) = gateway.ask_admin("/status").json()["problems"]
        assert problem.startswith(f"namespace {other} can't be read: this gateway's Role there is missing"), problem
        assert f'cannot list resource "pods" in API group "" in the namespace "{other}"' in problem
        assert gateway.figure("stageline_gateway_endpoints_stale", namespace=other) == 1
        assert gateway.figure("stageline_gateway_endpoints_stale", namespace=first) == 0

        grant(cluster, first, [first, other])
        served_by(f"{other}/tiny", f"from {other}")
        served_by(f"{first}/tiny", f"from {first}")
        status, refused = ask(gateway, "tiny")
        assert (status, refused["error"]["code"]) == (400, "model_ambiguous"), refused
        assert gateway.figure("stageline_gateway_endpoints_stale") == 0, shown()
        assert gateway.figure("stageline_generation_tokens_total", namespace=other, model_name="tiny") > 0
        assert (may(cluster, first, first), may(cluster, first, other)) == (MAY, MAY)

        cluster.api.delete("PipelineModel", "tiny", other)
        served_by("tiny", f"from {first}")
