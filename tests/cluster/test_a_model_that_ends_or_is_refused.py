"""A model whose end hangs on a dead node, and one whose spec this version refuses."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import TOLERATION, InstantKubelet, instant_kubelet
from cluster.operator_under_test import condition_of, create_model, operator_replica, run_until_killed, wait_ready
from cluster.under_test import Cluster, to_json
from stageline_api.manifests.manifest_loader import parse_manifest
from stageline_api.resource.field_problem import FieldProblem
from stageline_operator.controller.loop import reconciler

SOON_SECONDS = 240.0


def test_a_deletion_in_the_foreground_does_not_wait_for_a_dead_node(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with cluster.connect() as client, ExitStack() as stack:
        kubelets = [stack.enter_context(instant_kubelet(client)) for _ in range(2)]
        arguments = ("--namespace", namespace, "--no-leader-elect")
        operator = stack.enter_context(operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments))
        stages = [each.selection for each in kubelets]
        create_model(cluster.api, namespace, "tiny", {"tolerations": [TOLERATION]}, stages=stages)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        kubelets[1].end()
        cluster.kubectl_ok("delete", "plm/tiny", "-n", namespace, "--cascade=foreground", "--wait=false")

        def is_gone() -> bool:
            return cluster.api.get("PipelineModel", "tiny", namespace) is None

        def shown() -> str:
            return f"{to_json(cluster.api.list('Pod', namespace))[-4000:]}\n{operator.log()}"

        wait_until("the model is gone", is_gone, SOON_SECONDS, shown)
        assert cluster.api.list("Pod", namespace) == [], shown()


def test_a_model_whose_spec_a_later_version_refuses_serves_on_and_is_looked_after_once_it_is_corrected(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if this version were stricter than the CRD that is installed."""

    def stricter(manifest: Any, **how: bool) -> Any:
        if manifest["spec"].get("engine", {}).get("seed") == 13:
            return [FieldProblem(path="spec.engine.seed", value="13", rule="must be luckier")]
        return parse_manifest(manifest, **how)

    def model() -> dict[str, Any]:
        return dict(cluster.api.get("PipelineModel", "tiny", namespace) or {})

    def group() -> tuple[int, str]:
        groups = model().get("status", {}).get("groups") or [{"incarnation": 0, "phase": ""}]
        return groups[0]["incarnation"], groups[0]["phase"]

    def condition(kind: str) -> tuple[str, str]:
        found = condition_of(model(), kind)
        return found.get("status", ""), found.get("reason", "")

    def live_until(is_over: Callable[[], bool]) -> None:
        assert run_until_killed(cluster.kubeconfig, namespace, lambda _: None, is_over, SOON_SECONDS)

    def seed(number: int) -> None:
        cluster.api.patch("PipelineModel", "tiny", {"spec": {"engine": {"seed": number}}}, namespace)

    monkeypatch.setattr(reconciler, "parse_manifest", stricter)
    create_model(cluster.api, namespace, "tiny", kubelet.template, engine={"seed": 7})
    live_until(lambda: condition("Ready")[0] == "True")
    seed(13)
    live_until(lambda: condition("Degraded") == ("True", "BadConfiguration"))
    assert group() == (1, "Ready"), to_json(model())
    assert condition("Available")[0] == "True", to_json(model())
    pod = cluster.api.get("Pod", "tiny-0-1-1", namespace)
    assert pod is not None
    kubelet.end_container(pod, 66, "out of device memory")
    seed(7)
    live_until(lambda: group() == (2, "Ready"))
    assert condition("Degraded")[0] == "False", to_json(model())
