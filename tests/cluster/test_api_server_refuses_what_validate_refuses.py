"""`kubectl apply` refuses what `stageline validate` refuses, by the schema and the CEL rules of the CRD alone."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from cluster.manifest_samples import manifest
from cluster.refused_specs import refused_manifests
from cluster.under_test import Cluster
from processes.repository_files import ROOT

CASES = refused_manifests()
NOT_IN_JSON = {
    name
    for name, (body, _) in CASES.items()
    if any(isinstance(v, float) and math.isnan(v) for v in body["spec"].values())
}
LATER = {
    "overlay-of-a-probe": "what a pod may have is the pod API's to say: the operator says what of it is the group's",
    "gang-and-its-reference-by-hand": "the same: what is laid over a pod is not in the schema",
    "null": "the API server drops a null where there is a default",
    "vllm-owned-argument-shortened": "every beginning of every name is more than a rule may cost: the operator says it",
}
NAME_CASES = {
    "name-long": (manifest(name="a" * 41), "metadata.name must be at most 40 characters"),
    "name-dots": (manifest(name="a.b"), "metadata.name must be lower-case letters"),
    "name-digit-first": (manifest(name="1a"), "metadata.name must be lower-case letters"),
}
REFUSED = sorted(set(CASES) - NOT_IN_JSON - set(LATER))


def parents_of(line: str) -> set[str]:
    """The field that a line of `stageline validate` starts with, and those above it, where a rule across them is."""
    path = re.sub(r"\[\d+\].*", "", line.split(": ")[0])
    return {path.rsplit(".", count)[0] for count in range(path.count(".") + 1)} - {"spec"}


def apply_dry(cluster: Cluster, body: dict[str, Any], namespace: str) -> httpx.Response:
    return cluster.api.create("PipelineModel", body, namespace, dry_run=True)


def words_of(response: httpx.Response) -> str:
    return str(response.json().get("message", ""))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_spec_is_refused_with_its_field(cluster: Cluster, name: str) -> None:
    body, line = CASES[name]
    response = apply_dry(cluster, body, "default")
    assert response.status_code in (400, 422), f"{response.status_code}: accepted {json.dumps(body['spec'])}"
    words = words_of(response)
    assert "spec: Invalid" in words or any(parent in words for parent in parents_of(line)), words


@pytest.mark.parametrize(("body", "words"), NAME_CASES.values(), ids=NAME_CASES.keys())
def test_a_name_that_pods_could_not_bear_is_refused(cluster: Cluster, body: dict[str, Any], words: str) -> None:
    response = apply_dry(cluster, body, "default")
    assert response.status_code == 422, response.text
    assert words in words_of(response)


@pytest.mark.parametrize("name", sorted(LATER))
def test_what_the_api_server_drops_is_accepted(cluster: Cluster, name: str) -> None:
    """So that the list of exceptions stays true."""
    response = apply_dry(cluster, CASES[name][0], "default")
    assert response.status_code == 201, f"{LATER[name]}: {response.text}"


def rules_of(schema: Any) -> Iterator[str]:
    """The message of every CEL rule in a schema."""
    match schema:
        case dict():
            for rule in schema.get("x-kubernetes-validations", []):
                yield rule["message"]
            for value in schema.values():
                yield from rules_of(value)
        case list():
            for value in schema:
                yield from rules_of(value)


def test_every_cel_rule_refuses_something(cluster: Cluster) -> None:
    """A rule that no case trips over may well never trip over anything."""
    crd = yaml.safe_load((ROOT / "charts/stageline/files/crds/stageline.dev_pipelinemodels.yaml").read_text())
    messages = set(rules_of(crd))
    bodies = [CASES[name][0] for name in REFUSED] + [body for body, _ in NAME_CASES.values()]
    said = " ".join(words_of(apply_dry(cluster, body, "default")) for body in bodies)
    assert len(messages) > 5
    assert {message for message in messages if message not in said} == set()


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_is_accepted(cluster: Cluster, file: Any) -> None:
    cluster.kubectl_ok("apply", "--dry-run=server", "--validate=strict", "-f", str(file))


def test_an_unknown_field_is_refused_by_kubectl(cluster: Cluster) -> None:
    """What isn't built is not in the schema; strict validation is kubectl's default."""
    body = manifest(replicas=1)
    body["spec"]["expert"] = 2
    done = cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(body))
    assert done.returncode != 0
    assert re.search(r'unknown field "spec.expert"', done.stderr), done.stderr
