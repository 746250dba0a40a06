"""On CPUs `spec.engine.graphs: auto` captures nothing, and graphs that are asked for are refused before stages load."""

import re
from pathlib import Path
from typing import Any

import pytest

from oracles.pipeline_checks import greedy
from oracles.tiny_models import write_tiny_llama
from processes.running_group import RunningGroup, page, running_group
from stageline_api import ports

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 24}


def steps_by_graph_mode(group: RunningGroup, stage: int) -> dict[str, int]:
    text = page(f"http://{group.addresses[stage]}:{ports.STAGE_HEALTH}/metrics").text
    found = re.findall(r'^stageline_stage_graph_steps_total\{graph="(\w+)".*\} ([\d.]+)$', text, re.MULTILINE)
    assert found, text
    return {mode: int(float(count)) for mode, count in found}


def test_auto_captures_nothing_and_says_so(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", num_layers=2)
    with running_group(tmp_path / "group", model_dir, 1, **SETTINGS) as group:
        group.generate((5, 6, 7), greedy(4))
        counts = steps_by_graph_mode(group, 0)
        assert "graphs are off (spec.engine.graphs auto)" in group.log("stage-0"), group.account()
    assert counts["off"] > 0
    assert counts["piecewise"] == counts["full"] == 0


@pytest.mark.parametrize("graphs", ["piecewise", "full"])
def test_graphs_that_are_asked_for_are_refused_by_name(graphs: str, tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", num_layers=2)
    with running_group(tmp_path / "group", model_dir, 2, start=False, graphs=graphs, **SETTINGS) as group:
        assert group.wait_ended("engine") == 64, group.account()
        words = group.last_words("engine")
        assert "Traceback" not in group.log("engine"), group.log("engine")
    assert words["failure_class"] == "BadConfig"
    assert words["detail"] == (
        f"spec.engine.graphs {graphs} can't be had: stage 0 runs on the CPU, and graphs are captured on devices alone; "
        "set it to off or auto"
    )
