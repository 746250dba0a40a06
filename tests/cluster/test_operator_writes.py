"""What the operator writes to a real API server: owned, applied by one manager, and repeatable."""

from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import (
    Killed,
    OperatorReplica,
    condition_of,
    create_model,
    operator_replica,
    run_until_killed,
    wait_ready,
)
from cluster.under_test import Cluster, to_json
from stageline_api.labels import INCARNATION
from stageline_operator.controller.settings import FIELD_MANAGER

KINDS = ("Pod", "Service", "ConfigMap", "Secret", "PodDisruptionBudget", "NetworkPolicy")
LABEL = {"stageline.dev/model": "tiny"}
SOON_SECONDS = 180.0


def owned(cluster: Cluster, namespace: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = ((kind, each) for kind in KINDS for each in cluster.api.list(kind, namespace, LABEL))
    return {(kind, each["metadata"]["name"]): each for kind, each in found}


def of_the_model(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Uids of the objects that outlive an incarnation."""
    return {key: each["metadata"]["uid"] for key, each in objects.items() if INCARNATION not in to_json(each)}


def is_ready(cluster: Cluster, namespace: str, incarnation: int = 1) -> bool:
    model = cluster.api.get("PipelineModel", "tiny", namespace)
    groups = ((model or {}).get("status") or {}).get("groups", [])
    at = [group["incarnation"] for group in groups]
    return at == [incarnation] and condition_of(model).get("status") == "True"


def test_everything_is_owned_and_applied_by_one_manager_and_nothing_is_added_to_the_model(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    applied = create_model(cluster.api, namespace, "tiny", kubelet.template)
    arguments = ("--namespace", namespace, "--lease-namespace", namespace)
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        wait_ready(cluster.api, namespace, "tiny", context=operator.log)
        objects = owned(cluster, namespace)
        model = cluster.api.get("PipelineModel", "tiny", namespace)
        assert model is not None
        assert model["metadata"].get("finalizers") is None
        assert model["metadata"].get("annotations") == applied["metadata"].get("annotations")
        assert model["metadata"]["generation"] == applied["metadata"]["generation"]
        for key, each in objects.items():
            owners = each["metadata"].get("ownerReferences", [])
            assert [owner["uid"] for owner in owners] == [model["metadata"]["uid"]], key
            ours = [entry for entry in each["metadata"]["managedFields"] if not entry.get("subresource")]
            managers = {entry["manager"] for entry in ours} - {"kube-controller-manager", "kube-scheduler"}
            assert managers == {FIELD_MANAGER}, (key, ours)

        def reporters() -> set[str | None]:
            events = cluster.api.list("Event", namespace)
            about_it = (each for each in events if each["involvedObject"]["kind"] == "PipelineModel")
            return {each.get("reportingComponent") for each in about_it}

        # An Event is posted after the status that it tells of.
        assert wait_until("it is told", reporters, SOON_SECONDS, operator.log) == {FIELD_MANAGER}
        assert operator.end() == 0
        assert operator.lines()[-1]["message"].startswith("released lease")
    cluster.api.delete("PipelineModel", "tiny", namespace)
    wait_until(
        "all of it is gone", lambda: not owned(cluster, namespace), SOON_SECONDS, lambda: owned(cluster, namespace)
    )


EDITS: dict[tuple[str, str], dict[str, Any]] = {
    ("Service", "tiny-engine"): {"spec": {"selector": {"stageline.dev/stage": "1"}}},
    ("Service", "tiny-stages"): {"spec": {"publishNotReadyAddresses": None}},
    ("PodDisruptionBudget", "tiny"): {"spec": {"minAvailable": 0}, "metadata": {"annotations": None}},
    ("NetworkPolicy", "tiny-engine"): {"spec": {"ingress": [{}]}},
    ("NetworkPolicy", "tiny-0-1"): {"metadata": {"labels": {"app.kubernetes.io/component": None}}},
}


def test_what_a_person_edits_is_made_as_it_was_and_what_they_add_stays(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    """Every kind, by a changed value, a removed one, a list that is owned as one, and a label."""
    create_model(cluster.api, namespace, "tiny", kubelet.template)
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        wait_ready(cluster.api, namespace, "tiny", context=operator.log)
        before = {key: content_of(each) for key, each in owned(cluster, namespace).items() if key in EDITS}
        theirs = {"metadata": {"annotations": {"example.org/note": "theirs"}}}
        for (kind, name), edit in EDITS.items():
            cluster.api.patch(kind, name, edit, namespace)
        cluster.api.patch("Service", "tiny-engine", theirs, namespace)

        def restored() -> bool:
            return {key: content_of(owned(cluster, namespace)[key]) for key in EDITS} == before

        wait_until("all is as it was", restored, SOON_SECONDS, operator.log)
        service = cluster.api.get("Service", "tiny-engine", namespace)
        assert service is not None
        assert service["metadata"]["annotations"]["example.org/note"] == "theirs"

        def is_said() -> bool:
            restored = [each for each in cluster.api.list("Event", namespace) if each["reason"] == "ObjectRestored"]
            return any("NetworkPolicy tiny-engine was edited" in each["message"] for each in restored)

        wait_until("it is said", is_said, SOON_SECONDS, operator.log)
        # The pass that put things back may still be counting what it did.
        look_again(cluster, operator, namespace, "once")
        calls = operator.samples("stageline_operator_api_requests_total")
        look_again(cluster, operator, namespace, "twice")
        after = operator.samples("stageline_operator_api_requests_total")
        patched = {key for key in after if key[2] == "patch" and key[1] != "events" and after[key] != calls.get(key)}
        assert not patched, "what was put back is not put back again"


def look_again(cluster: Cluster, operator: OperatorReplica, namespace: str, how_often: str) -> None:
    """Give the operator a reason for another pass, and wait for the end of one."""

    def passes() -> float:
        return sum(operator.samples("stageline_operator_reconcile_total").values())

    before = passes()
    cluster.kubectl_ok("annotate", "plm", "tiny", "-n", namespace, "--overwrite", f"looked={how_often}")
    wait_until("another pass", lambda: passes() > before, SOON_SECONDS, operator.log)


def content_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the operator applied, without what the API server writes and what a person may add."""
    notes = {k: v for k, v in manifest["metadata"].get("annotations", {}).items() if k.startswith("stageline.dev/")}
    return {"labels": manifest["metadata"]["labels"], "annotations": notes, "spec": manifest["spec"]}


SERVICE_PORT = {"name": "web", "port": 80, "protocol": "TCP", "targetPort": 80}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "Service": ("tiny-engine", {"selector": {"app": "theirs"}, "ports": [SERVICE_PORT]}),
    "Pod": ("tiny-0-1-1", {"containers": [{"name": "main", "image": "theirs"}], "schedulerName": "nobody"}),
}


@pytest.mark.parametrize("kind", THEIRS)
def test_an_object_of_a_needed_name_that_is_someone_elses_is_left_alone_and_said(
    cluster: Cluster,
    namespace: str,
    kubelet: InstantKubelet,
    tmp_path: Path,
    kind: str,
) -> None:
    name, spec = THEIRS[kind]
    theirs = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    response = cluster.api.create(kind, theirs, namespace)
    assert response.status_code == 201, response.text
    before = response.json()
    create_model(cluster.api, namespace, "tiny", kubelet.template)
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:

        def event() -> list[dict[str, Any]]:
            return [each for each in cluster.api.list("Event", namespace) if each["reason"] == "NameTaken"]

        found = wait_until("it is said", event, SOON_SECONDS, operator.log)
        assert f"{kind} {name} exists" in found[0]["message"]
        assert cluster.api.get(kind, name, namespace) == before
        cluster.api.delete(kind, name, namespace, grace_seconds=0)
        wait_ready(cluster.api, namespace, "tiny", context=operator.log)


def test_a_status_that_someone_else_wrote_meanwhile_is_not_overwritten(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet
) -> None:
    """Before each of the first status writes the model changes, so each of them is based on an old version."""
    create_model(cluster.api, namespace, "tiny", kubelet.template)
    changes: list[str] = []

    def interfere(what: str) -> None:
        if what.startswith("patch pipelinemodels") and len(changes) < 3:
            changes.append(f"change-{len(changes)}")
            note = {"metadata": {"annotations": {"example.org/note": changes[-1]}}}
            cluster.api.patch("PipelineModel", "tiny", note, namespace)

    over = run_until_killed(
        cluster.kubeconfig, namespace, interfere, lambda: is_ready(cluster, namespace), SOON_SECONDS
    )
    assert over
    model = cluster.api.get("PipelineModel", "tiny", namespace)
    assert model is not None
    assert len(changes) == 3
    assert model["metadata"]["annotations"]["example.org/note"] == changes[-1]
    assert model["status"]["groups"][0]["incarnation"] == 1
    assert len(cluster.api.list("Pod", namespace, LABEL)) == 2


def test_an_operator_killed_after_every_write_makes_the_same_objects_and_none_twice(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet
) -> None:
    """Each life dies before its second write, from the first pass to the replacement of a failed group.

    All that a life knew is lost with it, so this is a crash between every two calls, and after a write whose answer
    was never read.
    """
    create_model(cluster.api, namespace, "tiny", kubelet.template)
    lives = live_by_single_writes(cluster, namespace, 1)
    assert lives > 6, "a group takes at least a status, four objects and two pods"
    first = owned(cluster, namespace)
    failed = next(each for (kind, _), each in first.items() if kind == "Pod" and each["metadata"]["name"].endswith("1"))
    kubelet.end_container(failed, 66, "out of memory")
    live_by_single_writes(cluster, namespace, 2)
    second = owned(cluster, namespace)
    pods = sorted(name for kind, name in second if kind == "Pod")
    assert pods == ["tiny-0-2-0", "tiny-0-2-1"], to_json(pods)
    assert of_the_model(second) == of_the_model(first)
    model = cluster.api.get("PipelineModel", "tiny", namespace)
    assert model is not None
    failures = model["status"]["lastFailures"]
    assert [(each["failureClass"], each["stage"], each["incarnation"]) for each in failures] == [("OutOfMemory", 1, 1)]
    assert len(model["status"]["groups"][0]["restarts"]) == 1


def live_by_single_writes(cluster: Cluster, namespace: str, incarnation: int) -> int:
    """Lives until the group is ready at `incarnation`; each writes once, or once more than the last if that was idle.

    A write may change nothing: a new life must make sure of the Secret, which it is not allowed to look for.
    """
    allowed = 1
    for lives in range(1, 60):
        written: list[str] = []
        before = versions(cluster, namespace)

        def die_when_spent(what: str, written: list[str] = written, allowed: int = allowed) -> None:
            written.append(what)
            if len([each for each in written if " events" not in each]) > allowed:
                raise Killed(what)

        def is_over() -> bool:
            return is_ready(cluster, namespace, incarnation)

        if run_until_killed(cluster.kubeconfig, namespace, die_when_spent, is_over, SOON_SECONDS):
            return lives
        allowed = 1 if versions(cluster, namespace) != before else allowed + 1
    raise AssertionError(f"not ready after 60 lives: {to_json(cluster.api.get('PipelineModel', 'tiny', namespace))}")


def versions(cluster: Cluster, namespace: str) -> set[str]:
    """Changes whenever anything of the model does."""
    everything = [cluster.api.get("PipelineModel", "tiny", namespace), *owned(cluster, namespace).values()]
    return {f"{each['metadata']['uid']}@{each['metadata']['resourceVersion']}" for each in everything if each}
