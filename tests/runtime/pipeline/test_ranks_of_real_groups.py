"""Real groups whose stages have several ranks: Hugging Face's tokens in float32, and one stage for whoever looks."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from oracles.pipeline_checks import draw_prompts, greedy, hugging_face_tokens, open_stream, samples
from oracles.tiny_models import VOCAB_SIZE, write_tiny_qwen3
from processes.rank_processes import rank_pids
from processes.running_group import RunningGroup, page, running_group
from stageline_api import ports
from stageline_api.engine_http import SamplingParams

CONFIG: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 48, "tensor": 2}
SCHEMA = '{"enum":["abab","ba"]}'


def check_tokens(group: RunningGroup, model_dir: Path) -> None:
    """More requests than slots, prompts longer than a step, slots reused; every stream has its own length."""
    prompts = draw_prompts(16, VOCAB_SIZE, 90)
    lengths = [1 + (5 * index) % 17 for index in range(len(prompts))]
    actual = group.generate_all(prompts, [greedy(length) for length in lengths])
    assert actual == hugging_face_tokens(model_dir, prompts, lengths)


@pytest.fixture
def eight_heads(tmp_path: Path) -> Path:
    """Eight query and four KV heads, and a head by itself; `tiny_llama` has four and two."""
    return write_tiny_qwen3(tmp_path / "model", num_heads=8, num_kv_heads=4, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("family", "stage_count"),
    [
        ("tiny_llama", 2),
        pytest.param("tiny_llama", 1, marks=pytest.mark.thorough),
        pytest.param("tiny_qwen3", 2, marks=pytest.mark.thorough),
        *(pytest.param("eight_heads", count, marks=pytest.mark.thorough) for count in (1, 2)),
    ],
)
def test_two_ranks_a_stage(family: str, stage_count: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model_dir: Path = request.getfixturevalue(family)
    with running_group(tmp_path / "group", model_dir, stage_count, **CONFIG) as group:
        check_tokens(group, model_dir)
        check_pages(group, stage_count)
        check_options(group)
        check_drain(group)


def check_pages(group: RunningGroup, stage_count: int) -> None:
    """A stage's pages are of all its ranks, and say which rank is which where they differ."""
    for stage in range(stage_count):
        base = f"http://{group.addresses[stage]}:{ports.STAGE_HEALTH}"
        status = group.stage_status(stage)
        assert (status["phase"], status["stage"]) == ("Ready", stage), status
        metrics = samples(f"{base}/metrics")
        memory = metrics["stageline_rank_memory_bytes"]
        assert memory.keys() == {("0",), ("1",)}, memory
        assert sum(memory.values()) == status["memory_bytes"] == sum(metrics["stageline_stage_memory_bytes"].values())
        for name in ("busy", "exchange"):
            seconds = metrics[f"stageline_rank_{name}_seconds_total"]
            assert seconds.keys() == memory.keys(), seconds
            assert min(seconds.values()) > 0, seconds
        phases = metrics["stageline_stage_phase"]
        assert [phase for phase, value in phases.items() if value] == [("Ready",)], phases
        assert page(f"{base}/timeline?since_seq=-1").json()["steps"], "the first rank's timeline"
        assert (page(f"{base}/healthz").status_code, page(f"{base}/account").status_code) == (200, 404)
    assert group.engine_status()["stages_ready"] == stage_count


def check_options(group: RunningGroup) -> None:
    """What the last stage's first rank decides alone holds on all: a grammar, penalties, another draw."""
    prompt = (5, 6, 7)
    schema = SamplingParams(temperature=0.8, seed=3, json_schema=SCHEMA, max_tokens=90)
    with open_stream(group, prompt, schema) as stream:
        text = "".join(event.get("text", "") for event in stream.rest())
    assert json.loads(text) in ("abab", "ba"), text
    sampled = SamplingParams(temperature=0.9, top_p=0.7, seed=5, frequency_penalty=0.4, max_tokens=20, ignore_eos=True)
    assert group.generate(prompt, sampled) == group.generate(prompt, sampled)
    # Beside a greedy one: what each rank finds in its part of the vocabulary is settled by two exchanges.
    restricted = SamplingParams(temperature=0.9, top_p=0.7, seed=5, max_tokens=20, ignore_eos=True)
    alone = group.generate(prompt, restricted)
    assert len(alone) == 20
    assert group.generate_all([prompt, (9, 8)], [restricted, greedy(20)])[0] == alone


def check_drain(group: RunningGroup) -> None:
    """Told to end, the supervisor of one stage lets the group finish what it has begun; every rank ends."""
    last = len(group.addresses) - 1
    ranks = [pid for stage in range(last + 1) for pid in rank_pids(group, stage).values()]
    assert len(ranks) == 2 * (last + 1)
    with open_stream(group, (5, 6, 7), greedy(60)) as stream:
        stream.next_event()
        group.processes[f"stage-{last}"].send_signal(signal.SIGTERM)
        assert stream.rest()[-1]["type"] == "finished", group.account()
    for name in group.processes:
        assert group.wait_ended(name) == 0, group.account()
    assert group.last_words(f"stage-{last}")["failure_class"] == "Evicted"
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.thorough
@pytest.mark.parametrize("stage_count", [1, 2])
def test_three_ranks_of_a_real_model(stage_count: int, smollm2_dir: Path, tmp_path: Path) -> None:
    """Nine query heads and three of keys and values go by three."""
    prompts = draw_prompts(8, 49_000, 60)
    expected = hugging_face_tokens(smollm2_dir, prompts, [12] * len(prompts))
    config = CONFIG | {"tensor": 3, "max_model_len": 128}
    with running_group(tmp_path, smollm2_dir, stage_count, **config) as group:
        assert group.generate_all(prompts, [greedy(12)] * len(prompts)) == expected


def test_heads_that_do_not_divide_are_refused(smollm2_dir: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, smollm2_dir, 1, start=False, **CONFIG) as group:
        assert group.wait_ended("engine") == 64, group.account()
        words = group.last_words("engine")
        assert words["failure_class"] == "BadConfig"
        assert "spec.parallelism.tensor 2: the model's 9 query heads and 3 key and value heads" in words["detail"]
        group.wait_ended("stage-0")
        assert "Traceback" not in group.log("stage-0") + group.log("engine")
