"""What Argo CD's script and kstatus (Flux, Helm's --wait) make of a model, in the states that it goes through.

The script is run by Lua itself, on statuses as the planner writes them.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import lupa
import pytest
import yaml

from cluster.planned_cluster import PlannedCluster, tiny_model
from processes.repository_files import ROOT
from stageline_api.resource.field_problem import FieldProblem
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_operator.planner.status.model_conditions import refused_status

FILE = ROOT / "examples" / "gitops" / "argocd_cm.yaml"
KEY = "resource.customizations.health.stageline.dev_PipelineModel"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def argocd(manifest: dict[str, Any]) -> tuple[str, str]:
    """Health and message: Argo CD calls the script with the resource as `obj`."""
    script = yaml.safe_load(FILE.read_text(encoding="utf-8"))["data"][KEY]
    lua = lupa.LuaRuntime(register_eval=False)
    lua.globals().obj = lua.table_from(manifest, recursive=True)
    health = lua.execute(script)
    return health.status, health.message


def kstatus(manifest: dict[str, Any]) -> str:
    """By its rules for a resource of any kind: github.com/kubernetes-sigs/cli-utils, pkg/kstatus/README.md."""
    status = manifest.get("status", {})
    holds = {each["type"]: each["status"] for each in status.get("conditions", [])}
    if status.get("observedGeneration") != manifest["metadata"]["generation"]:
        return "InProgress"
    if holds.get("Stalled") == "True":
        return "Failed"
    return "Current" if holds.get("Ready") == "True" else "InProgress"


def manifest_of(cluster: PlannedCluster) -> dict[str, Any]:
    body = cluster.model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return body | {"status": cluster.status.model_dump(mode="json", by_alias=True, exclude_none=True)}


def never_seen() -> dict[str, Any]:
    return manifest_of(PlannedCluster(tiny_model()))


def starting() -> dict[str, Any]:
    cluster = PlannedCluster(tiny_model())
    cluster.settle()
    return manifest_of(cluster)


def serving(**spec: Any) -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(**spec))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    return cluster


def changed_and_not_seen() -> dict[str, Any]:
    cluster = serving()
    cluster.model = tiny_model(generation=2, engine={"seed": 7})
    return manifest_of(cluster)


def rolling() -> dict[str, Any]:
    cluster = serving()
    cluster.model = tiny_model(generation=2, engine={"seed": 7})
    cluster.settle()
    return manifest_of(cluster)


def overdue() -> dict[str, Any]:
    cluster = PlannedCluster(tiny_model(rollout={"progressDeadlineSeconds": 60}))
    cluster.settle()
    cluster.advance(61)
    cluster.settle()
    return manifest_of(cluster)


def down() -> dict[str, Any]:
    cluster = serving(restart={"maxRestarts": 0})
    cluster.end_container(0, 137)
    cluster.settle()
    return manifest_of(cluster)


def backing_off() -> dict[str, Any]:
    cluster = serving()
    cluster.end_container(0, 137)
    cluster.settle()
    return manifest_of(cluster)


def suspended() -> dict[str, Any]:
    cluster = serving()
    cluster.model = tiny_model(generation=2, suspend=True)
    cluster.settle()
    return manifest_of(cluster)


def refused() -> dict[str, Any]:
    manifest = never_seen()
    problems = [FieldProblem(path="spec.replicas", value="0", rule="must be at least 1")]
    status = refused_status(PipelineModelStatus(), manifest, problems, NOW)
    return manifest | {"status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}


STATES: list[tuple[Callable[[], dict[str, Any]], str, str, str]] = [
    (never_seen, "Progressing", "waiting for the operator", "InProgress"),
    (starting, "Progressing", "0 of 1 groups are ready", "InProgress"),
    (lambda: manifest_of(serving()), "Healthy", "1 of 1 groups are ready", "Current"),
    (changed_and_not_seen, "Progressing", "waiting for the operator", "InProgress"),
    (rolling, "Progressing", "groups have the current revision", "InProgress"),
    (overdue, "Degraded", "rollout.progressDeadlineSeconds (60 s)", "Failed"),
    (backing_off, "Progressing", "killed by SIGKILL", "InProgress"),
    (down, "Degraded", "spec.restart.maxRestarts is 0", "Failed"),
    (suspended, "Suspended", "0 of 0 groups are ready", "InProgress"),
    (refused, "Degraded", "spec.replicas: 0 is not allowed: must be at least 1", "Failed"),
]


@pytest.mark.parametrize(
    ("state", "health", "words", "kind"), STATES, ids=lambda given: getattr(given, "__name__", None)
)
def test_a_state_is_what_people_wait_for(
    state: Callable[[], dict[str, Any]], health: str, words: str, kind: str
) -> None:
    manifest = state()
    found, message = argocd(manifest)
    assert (found, kstatus(manifest)) == (health, kind), manifest["status"]
    assert words in message, message
