"""An overlay and values from elsewhere reach running stages; another overlay rolls; a refused one says why."""

from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.model_in_cluster import ModelInCluster, condition_in
from cluster.under_test import Cluster

SOON_SECONDS = 120.0
LICENSE = "known to the Secret alone"


@pytest.fixture(scope="module")
def shared_spec(cluster: Cluster, shared_namespace: str) -> dict[str, Any]:
    """A ServiceAccount, a variable from a Secret and one from the pod, and an overlay on the stage's container."""
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "models"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "license"}, "stringData": {"text": LICENSE}},
    ]
    for body in objects:
        cluster.apply(body | {"metadata": body["metadata"] | {"namespace": shared_namespace}})
    variables = [
        {"name": "LICENSE", "valueFrom": {"secretKeyRef": {"name": "license", "key": "text"}}},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    return {"template": {"serviceAccountName": "models", "env": variables, "podTemplate": overlay("first")}}


def overlay(shown: str) -> dict[str, Any]:
    return {
        "metadata": {"annotations": {"example.com/shown": f"{shown} of $(MODEL)"}},
        "spec": {
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"stageline.dev/model": "$(MODEL)"}},
                }
            ],
            "containers": [{"name": "stage", "env": [{"name": "SHOWN", "value": shown}]}],
        },
    }


def environment_of(model: ModelInCluster, stage: int, group: int = 0) -> dict[str, str]:
    raw = Path(f"/proc/{model.container_pid(stage, 'stage', group)}/environ").read_text(encoding="utf-8")
    return dict(line.split("=", 1) for line in raw.split("\0") if "=" in line)


def test_running_stages_have_what_was_laid_over_them(model: ModelInCluster) -> None:
    for stage in range(2):
        pod, variables = model.pod(stage), environment_of(model, stage)
        assert variables["LICENSE"] == LICENSE
        assert variables["POD"] == pod["metadata"]["name"]
        assert variables["SHOWN"] == "first"
        assert pod["metadata"]["annotations"]["example.com/shown"] == f"first of {model.name}"
        assert pod["spec"]["serviceAccountName"] == "models"
        assert not pod["spec"]["automountServiceAccountToken"]
        (spread,) = pod["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == {"stageline.dev/model": model.name}


def test_a_changed_overlay_replaces_the_group_and_a_refused_one_leaves_it(model: ModelInCluster) -> None:
    before = model.pod_uids()
    template = model.manifest["spec"]["template"]
    model.apply(template=template | {"podTemplate": overlay("second")})
    wait_until("other pods", lambda: not before & model.pod_uids(), SOON_SECONDS * 3, model.everything)
    model.until_ready()
    (group,) = model.status()["groups"]
    assert environment_of(model, 1, group["index"])["SHOWN"] == "second"

    kept = model.pod_uids()
    refused = {"spec": {"restartPolicy": "Always", "containers": [{"name": "mine", "image": "mine:1"}]}}
    model.apply(template=template | {"podTemplate": refused})

    def _says_why(status: dict[str, Any]) -> bool:
        words = str(condition_in(status, "Degraded").get("message", ""))
        return "podTemplate.spec.restartPolicy" in words and "podTemplate.spec.containers[0].name" in words

    model.until("the refusal names both fields", _says_why, SOON_SECONDS)
    assert model.pod_uids() == kept
