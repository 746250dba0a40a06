"""Whatever is in a file, reading it gives models or one-line problems; it never raises and never hangs."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.manifest_samples import SOURCE
from stageline_api.manifests.manifest_loader import LoadResult, load_manifests, parse_manifest
from stageline_api.resource.pipeline_model import PipelineModel

FULL: dict[str, Any] = {
    "apiVersion": "stageline.dev/v1alpha1",
    "kind": "PipelineModel",
    "metadata": {"name": "full", "namespace": "ns", "labels": {"a": "b"}},
    "spec": {
        "model": {"source": SOURCE, "servedName": "s", "cache": {"hostPath": "/c"}},
        "engine": {"name": "stageline", "dtype": "auto", "maxModelLen": 8, "maxNumSeqs": 1, "seed": 0},
        "parallelism": {"pipeline": 2, "tensor": 1},
        "stages": [{"layers": "0-1", "tolerations": [{"key": "k", "operator": "Exists"}]}, {"layers": "2-3"}],
        "template": {
            "image": "i",
            "resources": {"limits": {"cpu": 1, "memory": "1Gi"}},
            "env": [{"name": "A", "value": "b"}],
            "nodeSelector": {"zone": "a"},
            "terminationGracePeriodSeconds": 60,
        },
        "network": {"interface": "eth0"},
        "replicas": 1,
        "restart": {"maxRestarts": 1, "windowSeconds": 1, "backoffSeconds": 1},
        "timeouts": {"rendezvousSeconds": 1, "loadSeconds": 1, "stepSeconds": 1, "drainSeconds": 1},
    },
}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, each in inner for place in _places(each, (*path, key))]


def _assert_answered(result: LoadResult) -> None:
    assert result.models or result.problems
    for problem in result.problems:
        assert str(problem).isprintable(), repr(str(problem))
        assert len(str(problem)) < 1500, problem


def test_the_full_manifest_is_valid() -> None:
    assert isinstance(parse_manifest(copy.deepcopy(FULL)), PipelineModel)


@given(st.sampled_from(_places(FULL)), _JSON)
def test_any_value_in_any_place_is_read_or_refused_where_it_stands(place: tuple[Any, ...], value: Any) -> None:
    document = copy.deepcopy(FULL)
    parent: Any = document
    for part in place[:-1]:
        parent = parent[part]
    parent[place[-1]] = value
    parsed = parse_manifest(document)
    if isinstance(parsed, PipelineModel):
        return
    _assert_answered(LoadResult((), tuple(parsed)))
    assert any(problem.path.startswith(str(place[0])) for problem in parsed), parsed


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.one_of(st.binary(max_size=200), st.text("ab:-[]{}&*!|>%@`'\"#?, \n\t0", max_size=60).map(str.encode)))
def test_any_bytes_are_answered(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "any.yaml"
    file.write_bytes(content)
    _assert_answered(load_manifests(file))


@pytest.mark.parametrize(
    "value",
    [
        "1" * 5000,
        "!!int x",
        "!!float x",
        "!!bool x",
        "!!timestamp x",
        "!!binary x",
        "!!null x",
        "1:99:99",
        "0x",
        "<<: 1",
        "!%0a x",
        '{"a\\nb": 1, "a\\nb": 2}',
    ],
    ids=lambda value: value[:12],
)
def test_a_scalar_that_yaml_itself_chokes_on_is_answered(tmp_path: Path, value: str) -> None:
    file = tmp_path / "scalar.yaml"
    file.write_text(f"kind: {value}\n")
    _assert_answered(load_manifests(file))
