"""A pod that its kubelet refuses was never started, whatever the kubelet calls it: nobody's fault, nobody's restart."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api.failures import FailureClass, TerminationMessage

WORDS = [
    "AppArmor",
    "DeadlineExceeded",
    "Evicted",
    "InitContainerRestartPolicyForbidden",
    "NodeAffinity",
    "NodeLost",
    "NodeName",
    "NodePorts",
    "NodeShutdown",
    "OutOfcpu",
    "OutOfnvidia.com/gpu",
    "OutOfpods",
    "PodOSNotSupported",
    "PodFeatureUnsupported",
    "Preempting",
    "SMTAlignmentError",
    "SysctlForbidden",
    "TaintToleration",
    "Terminated",
    "TopologyAffinityError",
    "UnexpectedAdmissionError",
    "",
]
WAITING = [
    {"name": "stage", "ready": False, "restartCount": 0, "state": {"waiting": {"reason": "PodInitializing"}}},
]
NEVER_FOUND = [
    {
        "name": "stage",
        "ready": False,
        "restartCount": 0,
        "lastState": {},
        "state": {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "finishedAt": None}},
    }
]
MESSAGE = "Pod was rejected: Resources cannot be allocated"


def started(**spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(restart={"maxRestarts": 1}, **spec))
    cluster.settle()
    return cluster


def refuse(cluster: PlannedCluster, stage: int, reason: str, containers: list[dict[str, Any]]) -> None:
    pod = cluster.pod(stage)
    pod["spec"]["nodeName"] = f"node-{stage}"
    pod["status"] = {"phase": "Failed", "reason": reason, "message": MESSAGE, "containerStatuses": containers}


@pytest.mark.parametrize("containers", [[], WAITING, NEVER_FOUND], ids=["no-status", "waiting", "never-found"])
@pytest.mark.parametrize("reason", WORDS, ids=lambda word: word or "no-word")
def test_whatever_the_word_it_costs_no_restart_and_the_status_has_the_kubelets_own(
    reason: str, containers: list[dict[str, Any]]
) -> None:
    cluster = started()
    for _ in range(4):
        refuse(cluster, 1, reason, containers)
        cluster.settle()
        assert (cluster.phase(), cluster.status.groups[0].restarts, sorted(cluster.pods)) == ("Waiting", (), [])
        (failure,) = cluster.status.last_failures
        assert (failure.failure_class, failure.stage, failure.reason) == ("Unschedulable", 1, reason)
        assert MESSAGE in failure.message
        assert reason in failure.message
        assert cluster.condition("Ready") == ("False", "Unschedulable")
        assert MESSAGE in cluster.condition_message("Ready")
        cluster.advance(61)
        cluster.settle()
    assert (cluster.phase(), cluster.status.groups[0].incarnation) == ("Starting", 5)


@given(st.text(alphabet=st.characters(categories=["Lu", "Ll"]), max_size=40))
def test_no_list_of_words_is_needed(reason: str) -> None:
    cluster = started()
    refuse(cluster, 0, reason, [])
    cluster.settle()
    assert (cluster.phase(), cluster.status.groups[0].restarts) == ("Waiting", ())


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "OutOfcpu", "TopologyAffinityError", "NodePorts"])
@pytest.mark.parametrize("keeps_statuses", [True, False])
def test_a_kubelet_that_starts_again_and_refuses_what_ran_costs_no_restart(reason: str, keeps_statuses: bool) -> None:
    """A device plugin that is not back yet, for instance; its peers lose it."""
    cluster = started()
    cluster.make_ready()
    cluster.settle()
    containers = cluster.pod(1)["status"]["containerStatuses"] if keeps_statuses else []
    refuse(cluster, 1, reason, containers)
    lost = TerminationMessage(failure_class=FailureClass.PEER_LOST, stage=0, peer=1, detail="lost my peer")
    cluster.end_container(0, 71, lost)
    cluster.settle()
    assert (cluster.phase(), cluster.status.groups[0].restarts) == ("Waiting", ())
    assert cluster.status.last_failures[0].reason == reason


def test_peers_that_give_up_on_a_refused_pod_are_no_cause() -> None:
    cluster = started()
    late = TerminationMessage(failure_class=FailureClass.RENDEZVOUS_TIMEOUT, peer=1, detail="stage 1 did not come")
    cluster.end_container(0, 70, late, container="engine")
    refuse(cluster, 1, "TopologyAffinityError", [])
    cluster.settle()
    assert (cluster.phase(), cluster.status.groups[0].restarts) == ("Waiting", ())
    assert cluster.status.last_failures[0].failure_class == "Unschedulable"


def test_a_failure_beside_a_refused_pod_counts() -> None:
    cluster = started()
    cluster.end_container(0, 64, TerminationMessage(failure_class=FailureClass.BAD_CONFIG, stage=0, detail="no"))
    refuse(cluster, 1, "TopologyAffinityError", [])
    cluster.settle()
    assert cluster.condition("Degraded") == ("True", "BadConfiguration")


def test_refusals_are_no_crashes() -> None:
    cluster = PlannedCluster(tiny_model())
    for _ in range(4):
        cluster.settle()
        refuse(cluster, 1, "NodePorts", [])
        cluster.settle()
        cluster.advance(61)
    cluster.settle()
    cluster.end_container(1, 1, "boom")
    cluster.settle()
    assert (cluster.status.last_failures[0].failure_class, cluster.status.last_failures[0].message) == (
        "Internal",
        "boom",
    )


def test_a_pod_that_ran_past_its_deadline_is_a_failure() -> None:
    cluster = started()
    cluster.pod(1)["status"] |= {"phase": "Failed", "reason": "DeadlineExceeded", "message": "active for too long"}
    cluster.settle()
    assert len(cluster.status.groups[0].restarts) == 1
    assert cluster.status.last_failures[0].message == "active for too long"


@pytest.mark.parametrize(("container", "exit_code"), [("prepare", 65), ("user-init", 1)])
def test_a_pod_of_which_an_init_container_failed_was_begun(container: str, exit_code: int) -> None:
    cluster = started()
    ended = {"exitCode": exit_code, "reason": "Error", "message": "no such file"}
    cluster.pod(1)["status"] = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": container, "state": {"terminated": ended}}],
        "containerStatuses": WAITING,
    }
    cluster.settle()
    assert len(cluster.status.groups[0].restarts) == 1
    assert cluster.status.last_failures[0].container == container


def test_a_pod_that_somebody_deletes_before_it_began_is_evicted() -> None:
    cluster = started()
    cluster.holds_deletions = True
    cluster.pod(1)["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    refuse(cluster, 1, "", NEVER_FOUND)
    cluster.step()
    assert cluster.status.last_failures[0].failure_class == "Evicted"
    assert cluster.status.groups[0].restarts == ()
