"""A stage that can't have the C kernels answers on torch's own operators, and its metrics say so."""

from pathlib import Path

import pytest

from oracles.pipeline_checks import greedy, stage_samples
from oracles.tiny_models import write_tiny_llama
from processes.running_group import running_group


@pytest.mark.parametrize(("compiler", "expected"), [("cc", 0.0), ("false", 1.0)])
def test_lacking_kernels_are_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, expected: float
) -> None:
    monkeypatch.setenv("CC", compiler)
    model_dir = write_tiny_llama(tmp_path / "model", num_layers=1)
    with running_group(tmp_path / "group", model_dir, 1, dtype="float32", max_num_seqs=2) as group:
        assert len(group.generate((5, 6, 7), greedy(3))) == 3
        found = stage_samples(group, 0)["stageline_stage_lacks_native_kernels"]
        assert list(found.values()) == [expected], group.log("stage-0")
