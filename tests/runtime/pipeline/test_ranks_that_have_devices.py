"""Real groups whose ranks have a device each, in disguise: Hugging Face's tokens, and a lost rank on record.

Supervisor, meeting, communicators, plans in flight and lanes are what ranks on GPUs run; gloo carries what NCCL would.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.pipeline_checks import draw_prompts, greedy, hugging_face_tokens, open_stream, samples, stage_samples
from oracles.tiny_models import VOCAB_SIZE, write_tiny_mixtral
from processes import device_ranks_stage
from processes.rank_processes import rank_pids
from processes.running_group import RunningGroup, running_group
from stageline_api.engine_http import SamplingParams
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS

SUPPORT = Path(__file__).parents[2] / "support"
COMMAND = (str(SUPPORT / "processes" / "device_ranks_stage.py"),)
CONFIG: dict[str, Any] = {"dtype": "float32", "device": "cuda", "max_num_seqs": 6, "max_num_batched_tokens": 48}
STEP_SECONDS = 8.0
PROMPTS = draw_prompts(12, VOCAB_SIZE, 60)
LENGTHS = [1 + (5 * index) % 17 for index in range(len(PROMPTS))]


@pytest.fixture(autouse=True)
def support_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join([str(SUPPORT), *filter(None, sys.path)]))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mixtral(tmp_path_factory.mktemp("mixtral") / "model")


@pytest.mark.parametrize(
    ("kind", "stage_count"),
    [
        pytest.param("tensor", 2, marks=pytest.mark.soak),
        pytest.param("tensor", 1, marks=pytest.mark.soak),
        ("expert", 2),
        pytest.param("expert", 1, marks=pytest.mark.soak),
    ],
)
def test_tokens_are_hugging_faces(kind: str, stage_count: int, tiny_llama: Path, mixtral: Path, tmp_path: Path) -> None:
    model_dir = tiny_llama if kind == "tensor" else mixtral
    expected = hugging_face_tokens(model_dir, PROMPTS, LENGTHS)
    settings = CONFIG | {kind: 2}
    with running_group(tmp_path, model_dir, stage_count, stage_command=COMMAND, **settings) as group:
        assert group.generate_all(PROMPTS, [greedy(length) for length in LENGTHS]) == expected
        assert [group.generate(PROMPTS[at], greedy(LENGTHS[at])) for at in (0, 1)] == expected[:2], "one rank idles"
        sampled = SamplingParams(temperature=0.9, top_p=0.7, seed=5, frequency_penalty=0.4, max_tokens=12)
        assert group.generate((5, 6, 7), sampled) == group.generate((5, 6, 7), sampled)
        for stage in range(stage_count):
            found = stage_samples(group, stage)
            assert found["stageline_rank_memory_bytes"].keys() == {("0",), ("1",)}, found
            assert min(found["stageline_rank_busy_seconds_total"].values()) > 0, found
            exchanged = found["stageline_rank_exchange_seconds_total"]
            assert exchanged.keys() == {("0",), ("1",)}, found
            assert min(exchanged.values()) > 0, "each rank's device has timed its own"


def test_devices_of_experts_hold_together_what_each_has_room_for(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each for a bit more than two whole sequences, of eight that are asked for: some wait, or are computed again."""
    config = read_model_config(mixtral)
    room = 14
    per_block = BLOCK_TOKENS * config.kv_bytes_per_token(config.num_layers, torch.float32.itemsize)
    monkeypatch.setenv(device_ranks_stage.CACHE_BYTES, str(room * per_block + per_block // 2))
    prompts = draw_prompts(14, VOCAB_SIZE, 60)
    expected = hugging_face_tokens(mixtral, prompts, [30] * len(prompts))
    settings = CONFIG | {"expert": 2, "max_model_len": 96, "max_num_seqs": 8}
    with running_group(tmp_path, mixtral, 1, stage_command=COMMAND, **settings) as group:
        assert group.generate_all(prompts, [greedy(30)] * len(prompts)) == expected
        assert sum(samples(f"{group.url}/metrics")["stageline_kv_blocks"].values()) == 2 * room
        (capacity,) = stage_samples(group, 0)["stageline_stage_kv_capacity_tokens"].values()
        assert capacity == 2 * room * BLOCK_TOKENS


def test_drafts_hold_where_ranks_have_devices(tiny_llama: Path, tmp_path: Path) -> None:
    """They are judged on the host of each rank, behind the exchanges of its device."""
    prompts = [prompt * 3 for prompt in draw_prompts(3, VOCAB_SIZE, 12)]
    expected = hugging_face_tokens(tiny_llama, prompts, [40] * len(prompts))
    speculative = {"tokens": 6, "min_match": 1}
    settings = CONFIG | {"tensor": 2, "speculative": speculative}
    with running_group(tmp_path, tiny_llama, 1, stage_command=COMMAND, **settings) as group:
        assert group.generate_all(prompts, [greedy(40)] * len(prompts)) == expected


def assert_named(group: RunningGroup, stage: int, rank: int | None, failure_class: str) -> dict[str, Any]:
    """Everything ends, and the stage's last words name the rank."""
    for name in group.processes:
        group.wait_ended(name)
    words = group.last_words(f"stage-{stage}")
    told = (words["failure_class"], words["stage"], words["rank"])
    assert told == (failure_class, stage, rank), f"{words}\n{group.account()}"
    assert not any(rank_pids(group, each) for each in range(len(group.addresses)))
    assert "Traceback" not in "".join(group.log(name) for name in group.processes), group.account()
    return words


@pytest.mark.parametrize(
    ("stage", "rank", "number"),
    [
        (0, 1, signal.SIGKILL),
        pytest.param(1, 0, signal.SIGKILL, marks=pytest.mark.soak),
        (1, 1, signal.SIGSTOP),
        pytest.param(0, 0, signal.SIGSTOP, marks=pytest.mark.soak),
    ],
)
def test_a_rank_lost_while_it_serves_is_named(
    stage: int, rank: int, number: signal.Signals, tiny_llama: Path, tmp_path: Path
) -> None:
    settings = CONFIG | {"tensor": 2, "timeouts": {"step_seconds": STEP_SECONDS}}
    with running_group(tmp_path, tiny_llama, 2, stage_command=COMMAND, **settings) as group:
        with open_stream(group, (5, 6, 7), greedy(500)) as stream:
            stream.next_event()
            os.kill(rank_pids(group, stage)[rank], number)
            assert stream.rest()[-1]["type"] == "failed", group.account()
        if number is signal.SIGKILL:
            assert_named(group, stage, rank, "Killed")
            return
        words = assert_named(group, stage, rank, "StepTimeout")
        assert f"(without rank {rank}) took longer than {STEP_SECONDS:g} s" in words["detail"], words
        assert words["operation"].startswith("all-"), words


def test_a_rank_that_stands_still_is_named_though_there_is_no_request(tiny_llama: Path, tmp_path: Path) -> None:
    settings = CONFIG | {"tensor": 2, "timeouts": {"step_seconds": STEP_SECONDS}}
    with running_group(tmp_path, tiny_llama, 1, stage_command=COMMAND, **settings) as group:
        os.kill(rank_pids(group, 0)[1], signal.SIGSTOP)
        words = assert_named(group, 0, 1, "StepTimeout")
        assert words["operation"] == "all-reduce, heartbeat", words


@pytest.mark.parametrize(
    ("number", "rank"), [pytest.param(signal.SIGSTOP, None, marks=pytest.mark.soak), (signal.SIGKILL, 1)]
)
def test_a_rank_lost_as_they_join_ends_the_stage(
    number: signal.Signals, rank: int | None, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell who stands still within what all of them do; killed, it is named as ever."""
    monkeypatch.setenv(device_ranks_stage.STOPPED_RANK, "1")
    settings = CONFIG | {"tensor": 2, "timeouts": {"rendezvous_seconds": 40.0}}
    with running_group(tmp_path, tiny_llama, 1, start=False, stage_command=COMMAND, **settings) as group:
        group.wait_until(lambda: _is_stopped(group, 1), "rank 1 stands still")
        if number is signal.SIGKILL:
            os.kill(rank_pids(group, 0)[1], number)
        words = assert_named(group, 0, rank, "RendezvousTimeout" if rank is None else "Killed")
        assert rank is not None or words["operation"] == "join the ranks", words


def _is_stopped(group: RunningGroup, rank: int) -> bool:
    pid = rank_pids(group, 0).get(rank)
    try:
        return pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def test_ranks_that_share_a_device_are_refused(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(device_ranks_stage.SHARED_DEVICE, "H100 a")
    with running_group(tmp_path, tiny_llama, 1, start=False, stage_command=COMMAND, **CONFIG, tensor=2) as group:
        assert group.wait_ended("engine") == 64, group.account()
        words = group.last_words("engine")
        assert words["failure_class"] == "BadConfig"
        rule = "spec.parallelism.tensor 2: ranks 0 and 1 of stage 0 share H100 a, and NCCL takes one rank a device"
        assert words["detail"] == rule, words


def test_captured_layers_are_refused_for_ranks(tiny_llama: Path, tmp_path: Path) -> None:
    settings = CONFIG | {"tensor": 2, "graphs": "full"}
    with running_group(tmp_path, tiny_llama, 1, start=False, stage_command=COMMAND, **settings) as group:
        assert group.wait_ended("stage-0") == 64, group.account()
        words = group.last_words("stage-0")
        assert "cut over 2 ranks, whose exchanges can't be captured" in words["detail"], words
