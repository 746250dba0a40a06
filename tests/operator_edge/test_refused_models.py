"""A spec that this version refuses: what ran before it is known, and runs on."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cluster.planned_cluster import SETTING, PlannedCluster, tiny_model
from stageline_api.manifests.accepted_before import read_accepted_before
from stageline_api.manifests.manifest_loader import parse_manifest
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.controller.loop.refused_model import last_accepted, refused_status, step_as_before
from stageline_operator.planner.objects.identity import revision_of
from stageline_operator.planner.observed.observed_objects import revision_specs
from stageline_operator.planner.plan import plan
from stageline_operator.planner.types import Observed, Plan, Setting


def running() -> tuple[PlannedCluster, dict[str, Any]]:
    """Two groups that are ready, and their model's manifest with an edit that is refused."""
    cluster = PlannedCluster(tiny_model(replicas=2))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    manifest = cluster.model.model_dump(mode="json", by_alias=True, exclude_none=True)
    manifest["metadata"]["generation"] = 2
    manifest["spec"]["parallelism"]["pipeline"] = -4
    return cluster, manifest


def observed(cluster: PlannedCluster) -> Observed:
    return Observed(
        status=cluster.status,
        pods=tuple(cluster.pods.values()),
        objects=frozenset(cluster.objects),
        revision_specs=revision_specs(cluster.objects.values()),
    )


def test_the_spec_before_a_refused_one_is_the_one_that_runs() -> None:
    cluster, manifest = running()
    model = last_accepted(manifest, observed(cluster))
    assert model is not None
    assert model.spec == cluster.model.spec
    planned = plan(model, observed(cluster), cluster.now, "t", Setting("stageline:test"))
    assert planned.delete == ()
    assert [group.phase for group in planned.status.groups] == ["Ready", "Ready"]


def test_a_group_that_fails_under_a_refused_spec_is_made_again_as_it_was() -> None:
    cluster, manifest = running()
    model = last_accepted(manifest, observed(cluster))
    assert model is not None
    cluster.model = model
    cluster.end_container(0, 137)
    cluster.settle()
    cluster.advance(2)
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    assert [(group.incarnation, group.phase) for group in cluster.status.groups] == [(2, "Ready"), (1, "Ready")]


def test_policies_that_are_given_are_followed_and_those_that_are_refused_are_not() -> None:
    cluster, manifest = running()
    manifest["spec"]["replicas"] = 3
    model = last_accepted(manifest, observed(cluster))
    assert model is not None
    assert model.spec.replicas == 3
    manifest["spec"]["replicas"] = -3
    model = last_accepted(manifest, observed(cluster))
    assert model is not None
    assert model.spec.replicas == 2


@pytest.mark.parametrize(
    "refused", [{"replicas": -3}, {"rollout": {"partition": -1}}, {"restart": {"maxRestarts": -1}}]
)
def test_a_policy_that_is_refused_takes_no_other_one_with_it(refused: dict[str, Any]) -> None:
    cluster, manifest = running()
    manifest["spec"] |= {"suspend": True, "replicas": 5} | refused
    assert isinstance(parse_manifest({**manifest, "spec": {**cluster.model.to_manifest()["spec"], **refused}}), list)
    model = last_accepted(manifest, observed(cluster))
    assert model is not None
    assert model.spec.suspend, "or drained groups come back"
    assert model.spec.replicas == (2 if "replicas" in refused else 5)
    assert (model.spec.rollout, model.spec.restart) == (cluster.model.spec.rollout, cluster.model.spec.restart)


def test_what_never_ran_or_is_refused_as_well_is_not_run() -> None:
    cluster, manifest = running()
    assert last_accepted(manifest, Observed()) is None
    for (kind, _), each in cluster.objects.items():
        if kind == "ConfigMap":
            spec = json.loads(each["data"]["spec.json"])
            spec["parallelism"]["pipeline"] = -4
            each["data"]["spec.json"] = json.dumps(spec)
    assert last_accepted(manifest, observed(cluster)) is None


def test_an_unchanged_spec_that_a_stricter_version_refuses_is_made_again_as_it_was() -> None:
    """An earlier version took twice the requests that this one takes, and a grace shorter than the drain."""
    cluster, manifest = running()
    manifest["spec"] = json.loads(json.dumps(cluster.model.to_manifest()["spec"]))
    manifest["spec"]["engine"] |= {"maxNumSeqs": 100_000, "maxNumBatchedTokens": 100_000}
    manifest["spec"]["template"]["terminationGracePeriodSeconds"] = 5
    manifest["spec"]["template"]["resources"] = {"limits": {"cpu": 2}}
    assert isinstance(parse_manifest(manifest), list), "or this test shows nothing"
    earlier = read_accepted_before(manifest)
    assert earlier is not None
    cluster.model = earlier
    for _ in range(4):
        cluster.settle()
        cluster.make_ready()
    before = {name: pod["spec"] for name, pod in cluster.pods.items()}
    model = last_accepted(manifest, observed(cluster))
    assert model is not None
    cluster.model = model
    cluster.settle()
    assert {name: pod["spec"] for name, pod in cluster.pods.items()} == before, "what runs is left as it is"
    cluster.end_container(0, 137)
    cluster.settle()
    cluster.advance(2)
    cluster.settle()
    replaced = [pod["spec"] for name, pod in cluster.pods.items() if name not in before]
    assert [spec["containers"][0]["resources"] for spec in replaced] == [{"limits": {"cpu": "2"}}] * 2
    configs = [each["data"]["config.json"] for (kind, _), each in cluster.objects.items() if kind == "ConfigMap"]
    assert any('"max_num_seqs":100000' in text.replace(" ", "") for text in configs), configs


def ran_as(cluster: PlannedCluster, manifest: dict[str, Any], spec: dict[str, Any]) -> Observed:
    """The refused manifest's groups, had they been made from this spec."""
    earlier = read_accepted_before({**manifest, "spec": spec})
    assert earlier is not None
    revision = revision_of(earlier)
    return replace(
        observed(cluster),
        status=cluster.status.model_copy(update={"update_revision": revision}),
        revision_specs={revision: spec},
    )


def test_a_refusal_is_told_also_where_what_ran_before_can_not_be_planned(caplog: pytest.LogCaptureFixture) -> None:
    """An earlier version knew a kind of source that this one makes no pod from."""
    cluster, manifest = running()
    manifest["spec"] = {**cluster.model.to_manifest()["spec"], "model": {"source": "s3://bucket/tiny"}}
    problems = parse_manifest(manifest)
    assert isinstance(problems, list)
    seen = ran_as(cluster, manifest, manifest["spec"])
    refused = refused_status(seen.status, manifest, problems, cluster.now)
    planned: list[PipelineModel] = []

    def plan_of(model: PipelineModel) -> Plan:
        planned.append(model)
        return plan(model, seen, cluster.now, "t", SETTING)

    assert step_as_before(manifest, seen, refused, plan_of) is None, "or this test shows nothing"
    assert len(planned) == 1
    assert "no step can be planned" in caplog.text


def test_a_spec_that_can_not_even_be_read_without_rules_loses_no_refusal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of this version that fails on it, where rules are to say what is wrong."""
    cluster, manifest = running()
    problems = parse_manifest(manifest)
    assert isinstance(problems, list)
    refused = refused_status(cluster.status, manifest, problems, cluster.now)

    def stricter(_manifest: object) -> PipelineModel:
        raise ZeroDivisionError("a rule divides by pipeline")

    monkeypatch.setattr("stageline_operator.controller.loop.refused_model.parse_manifest", stricter)
    assert step_as_before(manifest, observed(cluster), refused, lambda _: pytest.fail("nothing to plan")) is None
    assert "divides by pipeline" in caplog.text


def test_a_step_for_what_ran_before_carries_the_refusal() -> None:
    cluster, manifest = running()
    problems = parse_manifest(manifest)
    assert isinstance(problems, list)
    seen = observed(cluster)
    refused = refused_status(seen.status, manifest, problems, cluster.now)
    step = step_as_before(manifest, seen, refused, lambda model: plan(model, seen, cluster.now, "t", SETTING))
    assert step is not None
    reasons = {each.type: (each.status, each.reason) for each in step.status.conditions}
    assert reasons["Ready"] == ("False", "BadConfiguration")
    assert reasons["Available"][0] == "True", "its groups serve on"
    assert step.status.observed_generation == 2
