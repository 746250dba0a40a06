"""Explicit layer ranges: exactly the partitions of a model's layers are accepted, in stage order."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.manifest_samples import manifest
from stageline_api.resource.pipeline_model import PipelineModel, PipelineModelSpec, check_cut

_BOUNDARIES = st.sets(st.integers(1, 200), min_size=1, max_size=12).map(lambda ends: [0, *sorted(ends)])


def _spec(ranges: list[tuple[int, int]]) -> PipelineModelSpec:
    stages: list[dict[str, Any]] = [{"layers": f"{first}-{last}"} for first, last in ranges]
    return PipelineModel.model_validate(manifest(parallelism={"pipeline": len(ranges)}, stages=stages)).spec


def _ranges(boundaries: list[int]) -> list[tuple[int, int]]:
    return [(start, end - 1) for start, end in pairwise(boundaries)]


@given(_BOUNDARIES)
def test_every_partition_of_the_layers_is_accepted(boundaries: list[int]) -> None:
    spec = _spec(_ranges(boundaries))
    assert spec.stage_layers is not None
    assert sum(each.count for each in spec.stage_layers) == boundaries[-1]
    assert check_cut(spec, boundaries[-1]) == []


@given(_BOUNDARIES, st.data())
def test_moving_one_end_is_refused_at_the_stage_where_it_shows(boundaries: list[int], data: st.DataObject) -> None:
    ranges = _ranges(boundaries)
    index = data.draw(st.integers(0, len(ranges) - 1), label="stage")
    moved = data.draw(st.integers(0, 300).filter(lambda first: first != ranges[index][0]), label="first layer")
    ranges[index] = (moved, max(moved, ranges[index][1]))
    with pytest.raises(ValidationError, match=rf"spec\.stages\[{index}\]\.layers: .* must start at layer"):
        _spec(ranges)


@given(_BOUNDARIES, st.integers(1, 300))
def test_a_cut_for_another_number_of_layers_is_refused(boundaries: list[int], num_layers: int) -> None:
    spec = _spec(_ranges(boundaries))
    paths = {problem.path for problem in check_cut(spec, num_layers)}
    expected = set() if num_layers == boundaries[-1] else {f"spec.stages[{len(spec.stages) - 1}].layers"}
    if len(spec.stages) > num_layers:
        expected.add("spec.parallelism.pipeline")
    assert paths == expected


@pytest.mark.parametrize(
    ("spec", "num_layers", "line"),
    [
        pytest.param(
            {"parallelism": {"pipeline": 31}},
            30,
            "spec.parallelism.pipeline: 31 is not allowed: must be at most 30, the model's number of layers",
            id="more-stages-than-layers",
        ),
        pytest.param(
            {"stages": [{"layers": "0-27"}]},
            30,
            'spec.stages[0].layers: "0-27" is not allowed: layers 28 to 29 are missing: '
            "the model has 30 layers, so the last stage must end at layer 29",
            id="too-short",
        ),
        pytest.param(
            {"stages": [{"layers": "0-30"}]},
            30,
            'spec.stages[0].layers: "0-30" is not allowed: '
            "the model has 30 layers, so the last stage must end at layer 29",
            id="too-long",
        ),
    ],
)
def test_a_cut_that_does_not_fit_the_model_says_so(spec: dict[str, Any], num_layers: int, line: str) -> None:
    parsed = PipelineModel.model_validate(manifest(**spec)).spec
    assert [str(problem) for problem in check_cut(parsed, num_layers)] == [line]
