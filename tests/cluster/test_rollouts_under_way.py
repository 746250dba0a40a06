"""A rollout that is held, gets nowhere, is taken back or overtaken: what serves goes on serving. Pods run nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.model_in_cluster import ModelInCluster, small_model
from cluster.operator_process import OperatorProcess
from cluster.under_test import Cluster

SOON_SECONDS = 180.0
EDITS = 20


@pytest.fixture
def model(
    cluster: Cluster, operator: OperatorProcess, kubelet: InstantKubelet, namespace: str
) -> Iterator[ModelInCluster]:
    """Three groups that are ready."""
    assert operator.pid
    found = small_model(cluster, namespace, Path("/models/tiny"), None, template=kubelet.template, replicas=3)
    found.apply()
    found.until_ready(groups=3)
    yield found
    kubelet.holds = False


def revisions(model: ModelInCluster) -> list[str]:
    return [group["revision"] for group in model.status()["groups"]]


def another_engine(model: ModelInCluster, seed: int = 7) -> dict[str, Any]:
    return {**model.manifest["spec"]["engine"], "seed": seed}


def test_a_partition_keeps_groups_as_they_are_even_when_one_fails(
    model: ModelInCluster, kubelet: InstantKubelet
) -> None:
    before, (old, *_) = model.pod_uids(), revisions(model)
    model.apply(engine=another_engine(model), rollout={"partition": 2})
    status = model.until_ready(groups=3)
    assert status["updatedReplicas"] == 1, status
    assert len(before & model.pod_uids()) == 4, "two groups of two stages are what they were"
    kept = next(group for group in status["groups"] if group["revision"] == old)
    kubelet.end_container(model.pod(1, group=kept["index"]), 66, "out of device memory")
    model.until_incarnation(kept["incarnation"], group=kept["index"])
    model.until_ready(groups=3)
    assert sorted(revision == old for revision in revisions(model)) == [False, True, True]
    model.apply(rollout={})
    status = model.until_ready(groups=3)
    assert old not in revisions(model)
    assert status["updatedReplicas"] == 3


def test_a_rollout_that_gets_nowhere_says_so_and_nothing_is_undone(
    model: ModelInCluster, kubelet: InstantKubelet
) -> None:
    before = model.pod_uids()
    kubelet.holds = True
    model.apply(engine=another_engine(model), rollout={"progressDeadlineSeconds": 2})
    too_late = "ProgressDeadlineExceeded"
    model.until("it says so", lambda _: model.condition("Progressing").get("reason") == too_late, SOON_SECONDS)
    assert model.condition("Progressing")["status"] == "False"
    assert "progressDeadlineSeconds (2 s)" in model.condition("Ready")["message"]
    assert model.condition("Available")["status"] == "True"
    status = model.status()
    assert (status["readyReplicas"], len(status["groups"])) == (3, 4), status
    wait_until("the new group has pods", lambda: before < model.pod_uids(), SOON_SECONDS, model.everything)
    events = ("events", "-n", model.namespace, "--for", f"plm/{model.name}")
    wait_until("an Event says so", lambda: too_late in model.cluster.kubectl_ok(*events), SOON_SECONDS)
    kubelet.holds = False
    model.until_ready(groups=3)
    assert not before & model.pod_uids(), "what was late is finished all the same"
    assert model.condition("Progressing")["reason"] == "AsExpected"


def test_a_revision_that_finds_no_node_keeps_no_group_of_the_good_one_from_coming_back(
    model: ModelInCluster, kubelet: InstantKubelet
) -> None:
    """Its group waits for a place; what fails meanwhile does not queue behind it."""
    old, template = revisions(model)[0], model.manifest["spec"]["template"]
    model.apply(template=template | {"nodeSelector": {"example.com/no": "such-node"}})

    def new_one_waits(status: dict[str, Any]) -> bool:
        new = [group for group in status["groups"] if group["revision"] != old]
        return len(new) == 1 and {row["reason"] for row in new[0].get("stages", [])} == {"Unschedulable"}

    status = model.until("the new group finds no node", new_one_waits, SOON_SECONDS)
    lost = next(group for group in status["groups"] if group["revision"] == old)
    kubelet.end_container(model.pod(1, group=lost["index"]), 66, "out of device memory")
    status = model.until_incarnation(lost["incarnation"], group=lost["index"])
    back = next(group for group in status["groups"] if group["index"] == lost["index"])
    assert back["revision"] == old, "as it was"
    status = model.until("three serve", lambda status: status["readyReplicas"] == 3, SOON_SECONDS)
    assert sorted(group["revision"] == old for group in status["groups"]) == [False, True, True, True]
    model.apply(template=template)
    model.until_ready(groups=3)
    assert revisions(model) == [old] * 3


def test_the_old_spec_applied_again_keeps_every_group_that_still_has_it(
    model: ModelInCluster, kubelet: InstantKubelet
) -> None:
    """Once before any new group is ready, and once when one has taken the place of an old one."""
    before, (old, *_) = model.pod_uids(), revisions(model)
    engine = model.manifest["spec"]["engine"]
    kubelet.holds = True
    model.apply(engine=another_engine(model))
    model.until("a fourth group starts", lambda status: len(status["groups"]) == 4, SOON_SECONDS)
    model.apply(engine=engine)
    model.until_ready(groups=3)
    assert model.pod_uids() == before
    kubelet.holds = False
    model.apply(engine=another_engine(model), rollout={"partition": 2})
    model.until_ready(groups=3)
    kept = before & model.pod_uids()
    assert len(kept) == 4
    model.apply(engine=engine, rollout={})
    model.until_ready(groups=3)
    assert kept < model.pod_uids()
    assert revisions(model) == [old] * 3


def test_rapid_edits_take_nothing_down_and_only_the_last_one_is_rolled_out(
    model: ModelInCluster, kubelet: InstantKubelet, operator: OperatorProcess
) -> None:
    """While the pods of an edit still start, the next one comes. Pods that serve hear nothing of it."""
    before, made = model.pod_uids(), pods_made(operator)
    seen: list[tuple[int, int]] = []
    kubelet.holds = True
    for seed in range(1, EDITS + 1):
        spec = {"spec": {"engine": {"seed": seed}}}
        status = model.cluster.api.patch("PipelineModel", model.name, spec, model.namespace)["status"]
        seen.append((status["readyReplicas"], len(status["groups"])))
        wait_until("it was looked at", model.is_observed, SOON_SECONDS, model.everything)
    # The group of the edit before may be gone and the last edit's not begun.
    wait_until("the last edit's group starts", lambda: before < model.pod_uids(), SOON_SECONDS, model.everything)
    # A pod is there before the operator has read that it is.
    wait_until("its pods are counted", lambda: pods_made(operator) > made, SOON_SECONDS, operator.log_end)
    assert pods_made(operator) - made <= 2 * EDITS, "at most one group for each edit"
    kubelet.holds = False

    def _rolled(status: dict[str, Any]) -> bool:
        seen.append((status["readyReplicas"], len(status["groups"])))
        return bool(status["updatedReplicas"] == status["readyReplicas"] == len(status["groups"]) == 3)

    model.until("the last edit is everywhere", _rolled)
    assert min(ready for ready, _ in seen) == 3, seen
    assert max(groups for _, groups in seen) == 4, seen

    def _configs() -> list[str]:
        found = model.cluster.api.list("ConfigMap", model.namespace, {"stageline.dev/model": model.name})
        return [each["data"]["config.json"] for each in found]

    # They go after the status that no longer needs them.
    wait_until("only one config is left", lambda: len(_configs()) == 1, SOON_SECONDS, model.everything)
    assert f'"seed": {EDITS}' in _configs()[0]
    assert not before & model.pod_uids()


def pods_made(operator: OperatorProcess) -> float:
    """Pods that the operator has created since it started; asked again because of a lost answer, a pod counts once."""
    samples = [sample for family in text_string_to_metric_families(operator.metrics()) for sample in family.samples]
    wanted = {"resource": "pods", "verb": "create", "code": "201"}
    return sum(
        each.value
        for each in samples
        if each.name == "stageline_operator_api_requests_total" and wanted.items() <= each.labels.items()
    )
