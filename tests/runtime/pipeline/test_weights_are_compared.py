"""Stages of one group hold the same weights: a stage with others is named before anything is loaded."""

import json
from pathlib import Path

from oracles.tiny_models import write_tiny_llama
from processes.running_group import RunningGroup, running_group, start_process
from stageline_api import env
from stageline_runtime.prepare.weights_digest import weights_digest


def start_with_another_model(group: RunningGroup, name: str, model_dir: Path) -> None:
    """As where a node's cache holds another version."""
    config = json.loads((group.directory / "config.json").read_text()) | {"source": f"file://{model_dir}"}
    own = group.directory / f"{name}.json"
    own.write_text(json.dumps(config))
    start_process(group, name, **{env.CONFIG: str(own)})


def test_a_stage_with_other_weights_ends_the_group_and_is_named(tmp_path: Path) -> None:
    model, other = (write_tiny_llama(tmp_path / name, seed=seed) for name, seed in (("one", 0), ("other", 1)))
    held_back = frozenset({"stage-1"})
    with running_group(tmp_path / "group", model, 2, start=False, held_back=held_back) as group:
        start_with_another_model(group, "stage-1", other)
        assert group.wait_ended("engine") == 65, group.account()
        words = group.last_words("engine")
        assert (words["failure_class"], words["peer"], words["operation"]) == ("ModelLoad", 1, "compare weights"), words
        assert f"stage 1 has other weights of file://{model} than stage 0" in words["detail"]
        assert weights_digest(other) in words["detail"]


def test_a_group_says_which_weights_it_holds(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    with running_group(tmp_path / "group", model, 2) as group:
        assert group.engine_status()["weights"] == weights_digest(model) != ""
