"""Another default in a later version restarts nothing, and what is made again is made with the defaults it had."""

import json
from typing import Any

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api.manifests.crd import build_crd
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects import identity
from stageline_operator.planner.objects.identity import SHAPELESS_FIELDS, revision_of

_SPEC = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
_REVISION = "b22ccd7755"


def defaulted(schema: dict[str, Any], value: Any) -> Any:
    """What the API server stores of an object."""
    if schema.get("type") != "object" or not isinstance(value, dict):
        return value
    stored = dict(value)
    for name, each in schema.get("properties", {}).items():
        if name not in stored and "default" in each:
            stored[name] = each["default"]
        if name in stored:
            stored[name] = defaulted(each, stored[name])
    return stored


def stored_model(**spec: Any) -> PipelineModel:
    manifest = tiny_model(**spec).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    manifest["spec"] = defaulted(_SPEC, manifest["spec"])
    return PipelineModel.model_validate(manifest)


def defaults(schema: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in schema.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name
        if name in SHAPELESS_FIELDS and not path:
            continue
        found |= {inner: each["default"]} if "default" in each and not each.get("properties") else {}
        found |= defaults(each, inner)
    return found


def test_what_the_api_server_stores_has_the_revision_of_what_a_person_wrote() -> None:
    assert "seed" in stored_model().model_dump(by_alias=True, exclude_unset=True)["spec"]["engine"]
    assert revision_of(stored_model()) == revision_of(tiny_model()) == _REVISION
    assert revision_of(stored_model(engine={"seed": 1})) == revision_of(tiny_model(engine={"seed": 1})) != _REVISION


def test_an_object_that_was_stored_with_an_earlier_default_keeps_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this version had another default than the first one, which was 3."""
    monkeypatch.setitem(identity.FIRST_DEFAULTS, "engine.seed", 3)
    monkeypatch.setitem(identity.FIRST_DEFAULTS, "parallelism.tensor", 1)
    assert revision_of(stored_model(engine={"seed": 3})) == _REVISION
    other = revision_of(stored_model())
    assert other != _REVISION, "one that is stored with the new default asks for other pods"
    assert revision_of(tiny_model()) == other


def test_a_default_that_changes_is_noted_with_its_first_value() -> None:
    """A changed default fails here: give its first value to `FIRST_DEFAULTS`. A new field is added to this list."""
    first = defaults(_SPEC) | identity.FIRST_DEFAULTS
    assert {path: first.get(path) for path in FIRST} == FIRST, json.dumps(first, indent=1)


GPU: dict[str, Any] = {"template": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}}
FIRST_LIMITS = {"maxNumSeqs": 16, "maxNumBatchedTokens": 512}


@pytest.mark.parametrize("spec", [{}, {"engine": {"device": "cpu"}}], ids=["auto", "cpu"])
def test_limits_of_cpus_have_the_revision_of_the_first_defaults(spec: dict[str, Any]) -> None:
    written = spec | {"engine": spec.get("engine", {}) | FIRST_LIMITS}
    assert revision_of(tiny_model(**spec)) == revision_of(tiny_model(**written))


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"engine": {"device": "cuda"}}, id="cuda"),
        pytest.param(GPU, id="auto"),
        pytest.param(GPU | {"engine": {"name": "vllm"}}, id="vllm"),
    ],
)
def test_stored_first_limits_keep_their_revision_and_those_of_gpus_are_another(spec: dict[str, Any]) -> None:
    stored = spec | {"engine": spec.get("engine", {}) | FIRST_LIMITS}
    cluster = PlannedCluster(tiny_model(**spec))
    cluster.settle()
    (config,) = [each for (kind, _), each in cluster.objects.items() if kind == "ConfigMap"]
    kept = json.loads(config["data"]["spec.json"])["engine"]
    assert (kept["maxNumSeqs"], kept["maxNumBatchedTokens"]) == (256, 8192)
    assert revision_of(tiny_model(**stored)) != revision_of(tiny_model(**spec))
    limits = {"maxNumSeqs": 256, "maxNumBatchedTokens": 8192}
    assert revision_of(tiny_model(**stored | {"engine": stored["engine"] | limits})) == revision_of(tiny_model(**spec))


def test_a_group_that_keeps_its_revision_is_made_again_with_the_defaults_it_had() -> None:
    rollout = {"maxSurge": 0, "maxUnavailable": 1, "partition": 1}
    cluster = PlannedCluster(tiny_model(rollout=rollout))
    cluster.settle()
    (config,) = [each for (kind, _), each in cluster.objects.items() if kind == "ConfigMap"]
    kept = json.loads(config["data"]["spec.json"])
    assert kept["engine"]["dtype"] == tiny_model().spec.engine.dtype
    assert kept["timeouts"]["drainSeconds"] == tiny_model().spec.timeouts.drain_seconds
    assert not set(kept) & set(SHAPELESS_FIELDS)


FIRST: dict[str, Any] = {
    "model.tokenSecretRef.key": "token",
    "engine.name": "stageline",
    "engine.dtype": "auto",
    "engine.maxNumSeqs": 16,
    "engine.maxNumBatchedTokens": 512,
    "engine.prefixCache": True,
    "engine.generationConfig": "model",
    "engine.graphs": "auto",
    "engine.device": "auto",
    "engine.seed": 0,
    "parallelism.pipeline": 1,
    "parallelism.tensor": 1,
    "parallelism.expert": 1,
    "stages": [],
    "template.imagePullSecrets": [],
    "template.resources.requests": {},
    "template.resources.limits": {},
    "template.env": [],
    "template.nodeSelector": {},
    "template.tolerations": [],
    "template.volumes": [],
    "template.securityContext.runAsNonRoot": True,
    "template.securityContext.runAsUser": 10001,
    "template.securityContext.runAsGroup": 10001,
    "template.securityContext.fsGroup": 10001,
    "template.securityContext.supplementalGroups": [],
    "template.labels": {},
    "template.annotations": {},
    "placement.spread": "Preferred",
    "placement.topologyKey": "kubernetes.io/hostname",
    "network.env": [],
    "timeouts.rendezvousSeconds": 120,
    "timeouts.loadSeconds": 1800,
    "timeouts.stepSeconds": 60,
    "timeouts.drainSeconds": 30,
}
