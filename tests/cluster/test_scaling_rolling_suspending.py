"""Groups are added, replaced and removed whole, and the ones that serve go on serving.

The tests share one model of two stages; each starts from one ready group.
"""

import math
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from chaos.steady_traffic import steady_traffic
from cluster.api import wait_until
from cluster.model_in_cluster import ModelInCluster, condition_in
from cluster.operator_process import OperatorProcess
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import column_of
from oracles.tiny_models import EOS_TOKEN_ID
from processes.gateway_process import GatewayProcess
from stageline_api import labels

GONE_SECONDS = 200.0


@pytest.fixture(scope="module")
def shared_spec() -> dict[str, Any]:
    """Answers may take as long as they need on a busy machine; a group that has none to finish ends at once."""
    return {"engine": {"dtype": "float32", "maxNumSeqs": 4, "maxModelLen": 512}, "timeouts": {"drainSeconds": 120}}


def test_one_group_becomes_three_and_one_again(model: ModelInCluster) -> None:
    """Through the scale subresource, as an autoscaler does it. The group that stays is not touched."""
    first = model.pod_uids()
    where = (f"plm/{model.name}", "-n", model.namespace)
    model.cluster.kubectl_ok("scale", *where, "--replicas=3")
    model.until_ready(groups=3)
    table = model.cluster.kubectl_ok("get", *where, "-o", "wide")
    assert [column_of(table, name) for name in ("READY", "DESIRED", "UP-TO-DATE", "STAGES")] == ["3", "3", "3", "2"]
    assert len(model.pods()) == 6
    assert first < model.pod_uids()
    model.cluster.kubectl_ok("scale", *where, "--replicas=1")
    model.until_ready(groups=1)
    wait_until("the others are gone", lambda: len(model.pods()) == 2, GONE_SECONDS, model.everything)
    assert model.pod_uids() == first


def test_a_request_to_a_model_at_zero_waits_until_it_is_scaled_up(
    model: ModelInCluster, shared_gateway: GatewayProcess
) -> None:
    wait_until("the gateway serves", shared_gateway.serves, GONE_SECONDS, shared_gateway.log_end)
    where = (f"plm/{model.name}", "-n", model.namespace)
    model.cluster.kubectl_ok("scale", *where, "--replicas=0")
    wait_until("all pods are gone", lambda: not model.pods(), GONE_SECONDS, model.everything)
    model.until("it is as its spec says", lambda status: condition_in(status, "Ready")["reason"] == "ScaledToZero")
    with steady_traffic(shared_gateway.url, model.name) as traffic:
        queued = "stageline_gateway_requests_queued"
        wait_until("a request waits", lambda: shared_gateway.figure(queued) >= 1, GONE_SECONDS, shared_gateway.log_end)
        model.cluster.kubectl_ok("scale", *where, "--replicas=1")
        wait_until("answers come", lambda: traffic.answers >= 3, GONE_SECONDS, lambda: traffic.failures)
    assert traffic.failures == []
    model.until_ready()


def test_a_changed_template_replaces_groups_without_a_failed_request(
    model: ModelInCluster, shared_gateway: GatewayProcess
) -> None:
    wait_until("the gateway serves", shared_gateway.serves, GONE_SECONDS, shared_gateway.log_end)
    with steady_traffic(shared_gateway.url, model.name) as traffic:
        wait_until("answers come", lambda: traffic.answers >= 3, GONE_SECONDS, lambda: traffic.failures)
        roll_to_another_template(model)
        asked = traffic.answers
        wait_until(
            "the new group answers", lambda: traffic.answers >= asked + 10, GONE_SECONDS, lambda: traffic.failures
        )
    assert traffic.failures == []
    # Same weights, greedy, float32: whoever answered, and whatever moved meanwhile, the words are the same.
    assert len(traffic.texts) == 1, traffic.texts


def test_answers_that_outlast_the_order_to_drain_end_where_they_began(
    model: ModelInCluster, shared_gateway: GatewayProcess
) -> None:
    wait_until("the gateway serves", shared_gateway.serves, GONE_SECONDS, shared_gateway.log_end)
    resumed = shared_gateway.resumed()
    endless: dict[str, Any] = {"logit_bias": {str(EOS_TOKEN_ID): -100}}
    with steady_traffic(shared_gateway.url, model.name, max_tokens=450, **endless) as traffic:
        wait_until("answers come", lambda: traffic.answers >= 3, GONE_SECONDS, lambda: traffic.failures)
        before, told = roll_to_another_template(model)
    assert traffic.failures == []
    assert any(began < before and told < ended for began, ended in traffic.spans), (before, told, traffic.spans)
    assert shared_gateway.resumed() == resumed, "no answer had to be continued by another group"
    assert len(traffic.texts) == 1, traffic.texts


def roll_to_another_template(model: ModelInCluster) -> tuple[float, float]:
    """Change the template and wait until only the new revision is left; there is always a group that serves.

    Returns a moment shortly before the old pods were told to end and one shortly after, by `time.monotonic`; the latter
    is never when they were gone too soon to be seen ending.
    """
    before, revision = model.pod_uids(), model.status()["groups"][0]["revision"]
    seen: list[tuple[int, int]] = []
    untold, told = time.monotonic(), []
    engine = model.manifest["spec"]["engine"]
    model.apply(engine=engine | {"maxNumSeqs": engine["maxNumSeqs"] + 1})

    def _rolled(status: dict[str, Any]) -> bool:
        nonlocal untold
        seen.append((status["readyReplicas"], len(status["groups"])))
        revisions = {group["revision"] for group in status["groups"] if group["phase"] == "Ready"}
        asked_at, pods = time.monotonic(), model.pods()
        if any("deletionTimestamp" in pod["metadata"] for pod in pods):
            told.append(time.monotonic())
        elif not told:
            untold = asked_at
        return revision not in revisions and len(revisions) == 1 and not before & {p["metadata"]["uid"] for p in pods}

    model.until("only the new revision is left", _rolled)
    model.until_ready()
    assert min(ready for ready, _ in seen) >= 1, seen
    assert max(groups for _, groups in seen) == 2, seen
    assert model.status()["updatedReplicas"] == 1
    return untold, next(iter(told), math.inf)


@contextmanager
def stopped(pids: Collection[int]) -> Iterator[None]:
    """Processes that do nothing for the length of the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_bad_image_never_takes_the_last_good_group_down(model: ModelInCluster) -> None:
    before = model.pod_uids()
    model.apply(template={"image": "example.org/none:2"})
    model.until("the new group can't start", lambda status: len(status["groups"]) == 2)

    def _waiting() -> bool:
        new = [pod for pod in model.pods() if pod["metadata"]["uid"] not in before]
        states = [each["state"] for pod in new for each in pod["status"].get("initContainerStatuses", [])]
        return any(state.get("waiting", {}).get("reason") == "ErrImagePull" for state in states)

    wait_until("the image can't be pulled", _waiting, GONE_SECONDS, model.everything)
    status = model.status()
    assert status["readyReplicas"] == 1
    assert model.condition("Available")["status"] == "True"
    assert before <= model.pod_uids()
    model.apply(template={})
    wait_until("the bad group is gone", lambda: model.pod_uids() == before, GONE_SECONDS, model.everything)
    model.until_ready()
    assert model.pod_uids() == before


def test_suspended_nothing_runs_and_resumed_it_serves_again(model: ModelInCluster) -> None:
    model.apply(suspend=True)
    wait_until("no pod is left", lambda: model.pods() == [], GONE_SECONDS, model.everything)
    model.until("the condition says so", lambda _: model.condition("Ready").get("reason") == "Suspended")
    assert model.cluster.api.list("ConfigMap", model.namespace, {labels.MODEL: model.name})
    model.apply(suspend=False)
    model.until_ready()


def test_an_eviction_may_take_one_stage_and_no_more(
    model: ModelInCluster, nodes: SimulatedNodes, operator: OperatorProcess
) -> None:
    """Every eviction costs a whole group, so `kubectl drain` gets one stage at a time; the group comes back."""
    before = model.incarnation()

    def _budget() -> int:
        (budget,) = model.cluster.api.list("PodDisruptionBudget", model.namespace)
        return int(budget.get("status", {}).get("disruptionsAllowed", 0))

    wait_until("the budget counts the pods", lambda: _budget() == 1, GONE_SECONDS, model.everything)
    pods = [model.pod(stage) for stage in (1, 0)]
    # What follows the first eviction must not come before the second: a pod that is ending anyway may be evicted.
    frozen = {operator.pid, *(nodes.of_pod(pod).pid for pod in pods)}
    with stopped(frozen):
        answers = [model.cluster.api.evict(pod["metadata"]["name"], model.namespace).status_code for pod in pods]
    assert answers == [201, 429]
    model.until_incarnation(before)
