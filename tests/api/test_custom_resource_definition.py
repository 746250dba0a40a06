"""The CRD: generated, structural, and saying what the Python types say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.manifest_samples import manifest
from stageline_api.conditions import ConditionType, Reason
from stageline_api.failures import FailureClass
from stageline_api.manifests import crd, field_reference
from stageline_api.resource.pipeline_model import PipelineModel

CHART_FILE = Path(__file__).parents[2] / "charts" / "stageline" / "files" / "crds" / crd.FILE_NAME
FORBIDDEN = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "const", "title", "additionalItems", "uniqueItems"}


def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = crd.build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from _nodes(each, f"{path}.{name}")
    if "items" in schema:
        yield from _nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from _nodes(schema["additionalProperties"], f"{path}[*]")


def _at(path: str) -> dict[str, Any]:
    return dict(_nodes(_schema()))[path]


@pytest.mark.parametrize("file", [crd.PACKAGED_FILE, CHART_FILE], ids=["package", "chart"])
def test_the_committed_file_is_what_the_types_say(file: Path) -> None:
    assert file.read_text() == crd.render_crd(), "run `python -m stageline_api.manifests.crd` and commit the result"


def test_the_schema_is_structural() -> None:
    for path, node in _nodes(_schema()):
        assert not FORBIDDEN & set(node), path
        assert ("type" in node) != node.get("x-kubernetes-int-or-string", False), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert node.get("default", 0) is not None, path
        if node.get("type") == "array":
            assert "items" in node, path


def test_everything_a_person_writes_is_described_and_bounded() -> None:
    for path, node in _nodes(_schema()["properties"]["spec"], "spec"):
        if not path.endswith(("[*]", "]")):
            assert node.get("description"), path
        match node.get("type"):
            case "string":
                assert "enum" in node or "maxLength" in node, path
            case "array":
                assert "maxItems" in node, path
            case "integer":
                assert {"minimum", "maximum"} <= set(node), path
            case "object" if "additionalProperties" in node:
                assert "maxProperties" in node, path


def test_the_defaults_are_those_of_the_types() -> None:
    spec = PipelineModel.model_validate(manifest()).to_manifest()["spec"]
    for name, node in _schema()["properties"]["spec"]["properties"].items():
        if name in ("model", "autoscaling"):  # one is required, the other is off where it is left out
            assert "default" not in node, name
        else:
            assert node["default"] == spec[name], name


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (".spec", "when one stage gives layers, every stage must"),
        (".spec", "must have one entry for each stage of parallelism.pipeline"),
        (".spec", "must be at least engine.maxNumSeqs"),
        (".spec", "without an overlap or a missing layer"),
        (".spec.model", "is only allowed with an hf:// source"),
        (".spec.model.source", "must be file:///dir, hf://org/name[@revision], pypi://"),
        (".spec.model", "no @revision of its own"),
        (".spec.model.cache", "a cache is in one place"),
        (".spec.rollout", "no group could ever be replaced"),
        (".spec.template.labels", "keys are set by Stageline itself"),
        (".spec.template.volumes[]", "give exactly one of"),
        (".spec.template.volumes[].mountPath", "which Stageline itself mounts"),
        (".spec.template.securityContext", "0 is root"),
        (".spec", "is only for engine.name: vllm"),
        (".spec", "whose exchanges are not captured"),
        (".spec", "must be one for each rank of a stage"),
        (".spec", "can't be above 1 where parallelism.tensor is"),
        (".spec", "is only for engine.name: stageline"),
        (".spec", "has no meaning under vllm"),
        (".spec.engine.extraArgs", "is set by the operator"),
        ("", "metadata.name must be at most 40 characters"),
    ],
)
def test_what_spans_fields_or_is_not_built_is_refused_by_a_rule_with_a_sentence(path: str, words: str) -> None:
    rules = _at(path)["x-kubernetes-validations"]
    assert any(words in rule["message"] for rule in rules), rules
    assert all(len(rule["rule"]) > 5 for rule in rules)


def test_lists_with_a_key_are_maps_and_their_keys_are_required() -> None:
    for path in (".status.conditions", ".status.groups", ".spec.template.env"):
        node = _at(path)
        assert node["x-kubernetes-list-type"] == "map"
        assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"]), path


def test_kubectl_shows_and_scales_it() -> None:
    built = yaml.safe_load(crd.render_crd())
    version = built["spec"]["versions"][0]
    columns = version["additionalPrinterColumns"]
    usual = [column["name"] for column in columns if "priority" not in column]
    wide = [column["name"] for column in columns if column.get("priority") == 1]
    assert usual == ["MODEL", "ENGINE", "READY", "DESIRED", "REASON", "AGE"]
    assert wide == ["STAGES", "UP-TO-DATE", "SERVED-NAME", "URL", "MESSAGE"]
    assert built["spec"]["names"]["shortNames"] == ["plm"]
    assert version["subresources"]["status"] == {}
    assert set(version["subresources"]["scale"].values()) == {".spec.replicas", ".status.replicas", ".status.selector"}


def test_the_committed_field_reference_is_what_the_types_say() -> None:
    committed = field_reference.DOCUMENT.read_text()
    assert committed == field_reference.render_field_reference(), (
        "run `python -m stageline_api.manifests.field_reference` and commit the result"
    )


def test_the_reference_types_every_field_and_explains_every_word_of_a_status() -> None:
    rows = [line.strip("|").split("|") for line in field_reference.render_field_reference().splitlines() if "|" in line]
    types = {row[0].strip("`"): row[1] for row in rows}
    assert types["spec.model.cache.sizeLimit"] == "quantity"
    assert types["status.lastFailures[].time"] == "time"
    assert [name for name, kind in types.items() if kind in ("", "None")] == []
    assert {*ConditionType, *Reason, *FailureClass} <= types.keys()


def test_the_reference_gives_repeated_fields_once() -> None:
    reference = field_reference.render_field_reference()
    assert reference.count(".secretKeyRef.optional`") == 1
    assert "Fields as in `spec.template.env`." in reference
