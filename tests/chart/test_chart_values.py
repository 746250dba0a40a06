"""Values: each is described once, covered by the schema, and refused by name when it is wrong."""

import json
from typing import Any

import helm_python
import pytest
import yaml

from cluster.chart_values_table import CHART, README, default_of, described_values, readme_with_table
from cluster.rendered_chart import rendered_objects

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 2}, "additional properties 'replicas' not allowed"),
    ({"operator": {"replcas": 3}}, "at '/operator': additional properties 'replcas' not allowed"),
    ({"operator": {"replicas": "3"}}, "at '/operator/replicas': got string, want integer"),
    ({"operator": {"workers": 0}}, "at '/operator/workers'"),
    ({"operator": {"namespaces": ["Team A"]}}, "at '/operator/namespaces/0': 'Team A' does not match pattern"),
    ({"operator": {"resources": {"request": {}}}}, "at '/operator/resources'"),
    ({"operator": {"logLevel": "verbose"}}, "must be one of 'debug', 'info', 'warning', 'error'"),
    ({"images": {"operator": {"digest": "abc"}}}, "at '/images/operator/digest'"),
    ({"images": {"pullPolicy": "always"}}, "at '/images/pullPolicy'"),
    ({"vllm": {"image": {"repository": "vllm"}}}, "at '/vllm/image': got object, want string"),
    ({"vllm": {"filesImage": "stageline:1 --no"}}, "at '/vllm/filesImage'"),
    ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "invalid propertyName 'app.kubernetes.io/name'"),
    ({"gateway": {"service": {"type": "Cluster"}}}, "at '/gateway/service/type'"),
    ({"gateway": {"service": {"port": 99999}}}, "at '/gateway/service/port'"),
    ({"gateway": {"corsOrigins": ["https://x/"]}}, "at '/gateway/corsOrigins/0': 'https://x/' does not match pattern"),
    ({"gateway": {"corsOrigins": ["https://Chat.example.org"]}}, "at '/gateway/corsOrigins/0': 'not' failed"),
    ({"gateway": {"corsOrigins": ["https://x:443"]}}, "at '/gateway/corsOrigins/0': 'not' failed"),
    ({"gateway": {"corsOrigins": ["http://x:80"]}}, "at '/gateway/corsOrigins/0': 'not' failed"),
    ({"gateway": {"corsOrigins": ["https://me@x"]}}, "at '/gateway/corsOrigins/0': 'https://me@x' does not match"),
    ({"gateway": {"keys": "secret"}}, "at '/gateway/keys': got string, want object"),
    (
        {"gateway": {"inferencePool": {"enabled": "yes"}}},
        "at '/gateway/inferencePool/enabled': got string, want boolean",
    ),
    ({"gateway": {"inferencePool": {"picker": "x"}}}, "at '/gateway/inferencePool': additional properties 'picker'"),
    ({"gateway": {"inferencePool": {"endpointPickerRef": {"port": {"number": 1}}}}}, "missing property 'name'"),
    ({"gateway": {"inferencePool": {"endpointPickerRef": {"name": "p"}}}}, "missing property 'port'"),
    (
        {"gateway": {"inferencePool": {"endpointPickerRef": {"name": "p", "port": {"number": 0}}}}},
        "at '/gateway/inferencePool/endpointPickerRef/port/number'",
    ),
    ({"gateway": {"namespaces": "team-a"}}, "at '/gateway/namespaces': got string, want array"),
    ({"gateway": {"namespaces": ["team-a", "team-a"]}}, "at '/gateway/namespaces'"),
    ({"gateway": {"extraEnv": [{"value": "x"}]}}, "missing property 'name'"),
    ({"tracing": {"endpoint": "collector:4318"}}, "at '/tracing/endpoint'"),
    ({"tracing": {"env": {"HOME": "/"}}}, "invalid propertyName 'HOME'"),
    ({"monitoring": {"monitors": True}}, "must be one of 'auto', 'always', 'never'"),
    ({"monitoring": {"interval": "15"}}, "at '/monitoring/interval'"),
    ({"networkPolicy": {"clientsFrom": [{}]}}, "at '/networkPolicy/clientsFrom/0'"),
    ({"imagePullSecrets": ["registry"]}, "at '/imagePullSecrets/0': got string, want object"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[json.dumps(values) for values, _ in REFUSED])
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        rendered_objects(values)
    assert words in str(refusal.value)


def test_the_readme_has_the_values_as_they_are() -> None:
    text = README.read_text(encoding="utf-8")
    assert readme_with_table(text) == text, "run `make generate` and commit the result"


def leaves(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> set[str]:
    """Paths that the schema knows, down to what it does not name further."""
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "properties" not in schema or path.endswith("resources"):
        return {path}
    assert schema.get("additionalProperties") is False, f"{path} takes anything"
    inner = schema["properties"].items()
    return {leaf for name, each in inner for leaf in leaves(each, definitions, f"{path}.{name}".lstrip("."))}


def test_schema_values_and_descriptions_cover_each_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    described = [path for path, _ in described_values()]
    assert len(set(described)) == len(described)
    assert leaves(schema, schema["definitions"]) - {"global"} == set(described)
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for path in described:
        default_of(path, values)
