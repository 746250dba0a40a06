"""Real groups whose layers are compiled give the tokens of eager groups in float32, and say what ran captured."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oracles.pipeline_checks import Prompt, draw_prompts, greedy, hugging_face_tokens, samples, wait_all_counted
from oracles.tiny_models import VOCAB_SIZE, write_tiny_llama, write_tiny_qwen3
from processes import eager_drafts_engine
from processes.running_group import ENGINE_COMMAND, RunningGroup, page, running_group
from processes.small_machines import short_stage_command
from stageline_api import ports
from stageline_runtime.native.build import find_compiler

NUM_REQUESTS = 14
"""So many, of such length, that cache runs out in whatever order they come."""
NUM_BLOCKS = 18
"""KV cache for two whole sequences, and six slots."""
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 24}

needs_compilers = pytest.mark.skipif(
    find_compiler() is None or shutil.which(os.environ.get("CXX") or "g++") is None,
    reason="compiling layers needs a C and a C++ compiler",
)


@pytest.fixture(scope="module")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of compiled code for all groups here, so that each graph is compiled once."""
    return tmp_path_factory.mktemp("cache")


def draw_mixed_prompts() -> list[Prompt]:
    """Every other one begins with the same 40 tokens."""
    [stem] = draw_prompts(10, VOCAB_SIZE, 40, seed=12)[-1:]
    prompts = draw_prompts(NUM_REQUESTS, VOCAB_SIZE, 33)
    return [(*stem, *prompt) if index % 2 else prompt for index, prompt in enumerate(prompts)]


def steps_by_graph_mode(group: RunningGroup, stage: int) -> dict[str, int]:
    text = page(f"http://{group.addresses[stage]}:{ports.STAGE_HEALTH}/metrics").text
    found = re.findall(r'^stageline_stage_graph_steps_total\{graph="(\w+)".*\} ([\d.]+)$', text, re.MULTILINE)
    assert found, text
    return {mode: int(float(count)) for mode, count in found}


@needs_compilers
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("graphs", "by_model"),
    [
        pytest.param("piecewise", False, marks=pytest.mark.soak),
        ("full", False),
        pytest.param("full", True, marks=pytest.mark.soak),
    ],
    ids=["piecewise", "full", "full-draft-model"],
)
def test_verifying_rows_run_captured_and_give_the_same_tokens(
    graphs: str, by_model: bool, tmp_path: Path, compiled_code: Path
) -> None:
    """One request at a time, so that rows with drafts come in every length, between decodes. The draft model is the
    model itself, which is right every time.
    """
    model_dir = write_tiny_llama(tmp_path / "model", num_layers=3)
    prompts = [prompt * 3 for prompt in draw_prompts(4, VOCAB_SIZE, 12)]
    sampling = greedy(60).model_copy(update={"logit_bias": dict.fromkeys(range(70, 73), 40.0)})
    with running_group(tmp_path / "eager", model_dir, 1, **SETTINGS) as group:
        expected = [group.generate(prompt, sampling) for prompt in prompts]
    with running_group(
        tmp_path / "group",
        model_dir,
        2,
        graphs=graphs,
        cache_dir=str(compiled_code),
        engine_command=eager_drafts_engine.COMMAND if by_model else ENGINE_COMMAND,
        speculative={"tokens": 15, "min_match": 1} | ({"draft_source": f"file://{model_dir}"} if by_model else {}),
        **SETTINGS,
    ) as group:
        assert [group.generate(prompt, sampling) for prompt in prompts] == expected
        assert samples(f"{group.url}/metrics")["stageline_engine_accepted_tokens_total"][()] > 20
        for stage in range(2):
            counts = steps_by_graph_mode(group, stage)
            assert counts["off"] == 0, counts
            assert counts["piecewise"] > 0, counts
        assert "recompile" not in group.log("stage-0"), group.account()


@needs_compilers
@pytest.mark.thorough
@pytest.mark.parametrize("graphs", ["piecewise", "full"])
@pytest.mark.parametrize("write_model", [write_tiny_llama, pytest.param(write_tiny_qwen3, marks=pytest.mark.soak)])
def test_two_stages_equal_hugging_face(
    write_model: Callable[..., Path], graphs: str, tmp_path: Path, compiled_code: Path
) -> None:
    """Prompts of several chunks meet decodes in one plan, half of them begin alike, and cache runs out."""
    model_dir = write_model(tmp_path / "model", num_layers=3)
    prompts = draw_mixed_prompts()
    lengths = [57 + (5 * index) % 14 for index in range(NUM_REQUESTS)]
    with running_group(
        tmp_path / "group",
        model_dir,
        2,
        graphs=graphs,
        cache_dir=str(compiled_code),
        max_model_len=144,
        stage_command=short_stage_command(NUM_BLOCKS),
        **SETTINGS,
    ) as group:
        actual = group.generate_at_once(prompts, [greedy(length) for length in lengths])
        figures = samples(f"{group.url}/metrics")
        wait_all_counted(group)
        counts = [steps_by_graph_mode(group, stage) for stage in range(2)]
        assert "graphs captured" in group.log("stage-0"), group.account()
        assert "recompile" not in group.log("stage-0"), group.account()
    assert actual == hugging_face_tokens(model_dir, prompts, lengths)
    assert figures["stageline_preemptions_total"][()] > 0, "cache never ran out"
    assert figures["stageline_prefix_cache_hits_total"][()] > 0, "nothing was found in the cache"
    assert counts[0] == counts[1], "the stages ran plans in different modes"
    assert counts[0]["off"] == 0
    assert counts[0]["piecewise"] > 0
    assert (counts[0]["full"] > 0) == (graphs == "full")


def test_auto_starts_without_compiling_and_says_so(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", num_layers=2)
    with running_group(tmp_path / "group", model_dir, 1, **SETTINGS) as group:
        group.generate((5, 6, 7), greedy(4))
        counts = steps_by_graph_mode(group, 0)
        assert "graphs are off (spec.engine.graphs auto)" in group.log("stage-0"), group.account()
    assert counts["off"] > 0
    assert counts["piecewise"] == counts["full"] == 0


@pytest.mark.parametrize("graphs", [pytest.param("piecewise", marks=pytest.mark.thorough), "full"])
def test_asked_for_graphs_without_a_compiler_are_refused_by_name(
    graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model_dir = write_tiny_llama(tmp_path / "model", num_layers=2)
    with running_group(tmp_path / "group", model_dir, 1, start=False, graphs=graphs, **SETTINGS) as group:
        assert group.wait_ended("stage-0") == 64, group.account()
        words = group.last_words("stage-0")
    assert words["failure_class"] == "BadConfig"
    assert words["detail"] == (
        f"spec.engine.graphs {graphs} can't be had: torch.compile needs a C++ compiler, and no-such-compiler is not on "
        "the path; set it to off or auto"
    )


@needs_compilers
@pytest.mark.thorough
def test_a_compiler_that_fails_is_a_bad_config_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    model_dir = write_tiny_llama(tmp_path / "model", num_layers=1)
    with running_group(tmp_path / "group", model_dir, 1, start=False, graphs="piecewise", **SETTINGS) as group:
        assert group.wait_ended("stage-0") == 64, group.account()
        words = group.last_words("stage-0")
        assert "Traceback" not in group.log("stage-0"), group.log("stage-0")
    assert words["failure_class"] == "BadConfig"
    assert words["detail"].startswith("spec.engine.graphs piecewise can't be had: torch.compile failed:"), words
