"""Real stage processes that compute on a device in disguise give the tokens of one CPU stage, captured and eager.

Engine core, plan bus, handshake, plans in flight and the staged transport are real; only the device is not.
"""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.pipeline_checks import draw_prompts, greedy, samples, stage_samples
from oracles.tiny_models import VOCAB_SIZE, write_early_exit_pair, write_tiny_llama
from processes import eager_drafts_engine
from processes.running_group import RunningGroup, running_group
from stageline_api.engine_http import SamplingParams
from stageline_api.errors import UserError
from stageline_api.failures import ExitCode, FailureClass, TerminationMessage
from stageline_bench.gpu_check.random_model import RandomModel, write_random_model
from stageline_bench.runtime.group.bench_group import GroupShape, bench_group
from stageline_bench.runtime.group.workload import Workload

MODEL = RandomModel(
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=512,
    dtype="float32",
    context_length=128,
)
ROUND = Workload(name="device", requests=6, input_tokens=21, output_tokens=12)
MAX_NUM_SEQS = 4
"""Two slots per cohort: the plans that end prompts sample more rows than one cohort has slots."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"frequency_penalty": 0.2},
    {"top_logprobs": 2, "temperature": 0.5},
)
SUPPORT = Path(__file__).parents[2] / "support"
DEVICE_STAGE = (str(SUPPORT / "processes" / "late_device_stage.py"),)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("random"), MODEL, torch.device("cpu"))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", num_layers=4)


@pytest.fixture(autouse=True)
def support_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join([str(SUPPORT), *filter(None, sys.path)]))


@pytest.mark.parametrize(
    ("stages", "graphs"),
    [
        pytest.param(2, "off", marks=pytest.mark.soak),
        (2, "auto"),
        pytest.param(1, "piecewise", marks=pytest.mark.soak),
    ],
)
def test_stages_on_a_shared_device_answer_as_one_cpu_stage(
    stages: int, graphs: str, tiny_model: Path, tmp_path: Path
) -> None:
    prompts = [tuple(prompt) for prompt in ROUND.prompts(VOCAB_SIZE)]
    lengths = [greedy(ROUND.output_tokens)] * len(prompts)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 32,
        "prefix_cache": False,
    }
    with running_group(tmp_path / "cpu", tiny_model, 1, **settings) as group:
        expected = group.generate_all(prompts, lengths)
    assert [len(answer) for answer in expected] == [ROUND.output_tokens] * ROUND.requests
    with running_group(
        tmp_path / "device", tiny_model, stages, stage_command=DEVICE_STAGE, graphs=graphs, **settings
    ) as group:
        assert group.generate_at_once(prompts, lengths) == expected


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_drafts_are_verified_on_a_device_as_on_a_cpu(stages: int, tmp_path: Path) -> None:
    """One request at a time; results that come late change nothing of what is verified."""
    model_dir = write_tiny_llama(tmp_path / "model", num_layers=3)
    prompts = [prompt * 3 for prompt in draw_prompts(len(OPTIONS), VOCAB_SIZE, 12)]
    few: dict[str, Any] = {"logit_bias": dict.fromkeys(range(70, 73), 40.0), "temperature": 0.0}
    asked = [SamplingParams(max_tokens=60, ignore_eos=True, seed=3, **few | options) for options in OPTIONS]
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128}
    with running_group(tmp_path / "plain", model_dir, 1, **settings) as group:
        expected = [group.generate(prompt, sampling) for prompt, sampling in zip(prompts, asked, strict=True)]
    with running_group(
        tmp_path / "drafting",
        model_dir,
        stages,
        stage_command=DEVICE_STAGE,
        engine_command=eager_drafts_engine.COMMAND,
        speculative={"tokens": 15, "min_match": 1},
        **settings,
    ) as group:
        assert [group.generate(prompt, one) for prompt, one in zip(prompts, asked, strict=True)] == expected
        figures = samples(f"{group.url}/metrics")
        assert figures["stageline_engine_accepted_tokens_total"][()] > 20, figures


def test_a_float16_checkpoint_stays_float16_on_devices(tmp_path: Path) -> None:
    """Weights and cache take half of what they take where float32 is asked for."""
    model_dir = write_tiny_llama(tmp_path / "model", dtype="float16")
    [prompt] = draw_prompts(1, VOCAB_SIZE, 20)
    held = {}
    for asked in ("auto", "float32"):
        with running_group(
            tmp_path / asked, model_dir, 2, stage_command=DEVICE_STAGE, dtype=asked, max_num_seqs=2, max_model_len=64
        ) as group:
            assert len(group.generate(prompt, greedy(8))) == 8
            held[asked] = sum(stage_samples(group, 1)["stageline_stage_memory_bytes"].values())
    assert held["auto"] == held["float32"] / 2, held


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_draft_model_drafts_on_a_device(stages: int, tmp_path: Path) -> None:
    """Two requests at a time, captured plans beside its eager steps; what it says is what the CPU's group verifies."""
    model_dir, draft = write_early_exit_pair(tmp_path / "models", num_layers=6)
    prompts = draw_prompts(len(OPTIONS), VOCAB_SIZE, 12)
    asked = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=3, **{"temperature": 0.0} | options) for options in OPTIONS
    ]
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128}

    def answers(group: RunningGroup) -> list[list[int]]:
        with ThreadPoolExecutor(2) as clients:
            return list(clients.map(group.generate, prompts, asked))

    with running_group(tmp_path / "plain", model_dir, 1, **settings) as group:
        expected = answers(group)
    with running_group(
        tmp_path / "drafting",
        model_dir,
        stages,
        stage_command=DEVICE_STAGE,
        engine_command=eager_drafts_engine.COMMAND,
        speculative={"tokens": 15, "draft_source": f"file://{draft}"},
        **settings,
    ) as group:
        assert answers(group) == expected
        figures = samples(f"{group.url}/metrics")
        assert figures["stageline_engine_accepted_tokens_total"][()] > 40, figures
        last = stage_samples(group, stages - 1)
        assert last["stageline_stage_steps_total"]["draft",] > 20, last
        assert last["stageline_stage_busy_seconds_total"]["draft",] > 0, last
        told = [figures["stageline_engine_draft_tokens_total"], figures["stageline_engine_drafted_rows_total"]]
        assert all(each[()] > 0 for each in told), told


def test_a_stage_with_a_device_ends_when_its_peer_dies_and_says_so(model_dir: Path, tmp_path: Path) -> None:
    """What the device has in flight must not keep the process. Which loss it sees first, the peer's or that of this
    benchmark's engine, which ends at once, is a race; either is told."""
    shape = GroupShape(name="dying", stage_cores=(0, 0), dtype="float32", max_model_len=64, stage_command=DEVICE_STAGE)
    with pytest.raises(UserError), bench_group(shape, model_dir, tmp_path) as group:  # noqa: PT012
        survivor, dying = (stage.process for stage in group.stages)
        os.killpg(dying.pid, signal.SIGSTOP)  # or the round might be over before it dies
        group.begin(ROUND)
        os.killpg(dying.pid, signal.SIGKILL)
        code = survivor.wait(timeout=120)
        group.finish()
    last_words = TerminationMessage.model_validate_json((tmp_path / "stage-0.termination").read_bytes())
    codes = {FailureClass.PEER_LOST: ExitCode.PEER_LOST, FailureClass.ENGINE_LOST: ExitCode.ENGINE_LOST}
    assert codes[last_words.failure_class] == code, last_words
