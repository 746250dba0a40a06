"""Real groups whose ranks divide a mixture's experts: Hugging Face's tokens, and idle ranks that never hang."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oracles.pipeline_checks import draw_prompts, greedy, hugging_face_tokens, open_stream, samples, stage_samples
from oracles.tiny_models import VOCAB_SIZE, write_tiny_llama, write_tiny_mixtral, write_tiny_qwen3_moe
from processes import eager_drafts_engine
from processes.rank_processes import rank_pids
from processes.running_group import ENGINE_COMMAND, RunningGroup, running_group

CONFIG: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 48, "expert": 2}
STEP_SECONDS = 8.0
PROMPTS = draw_prompts(14, VOCAB_SIZE, 60)
LENGTHS = [1 + (5 * index) % 17 for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mixtral(tmp_path_factory.mktemp("mixtral") / "model")


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its second layer has no experts."""
    return write_tiny_qwen3_moe(tmp_path_factory.mktemp("qwen3-moe") / "model", mlp_only_layers=[1])


@pytest.mark.parametrize(
    ("family", "stage_count"),
    [
        ("mixtral", 2),
        pytest.param("mixtral", 1, marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", 1, marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", 2, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("drafts", [pytest.param("", marks=pytest.mark.thorough), "by a model of experts"])
def test_tokens_whoever_has_the_requests(
    family: str, stage_count: int, drafts: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """One request at a time, whose rank alone has rows; all at once; and as chance has them come.

    The draft model is a mixture itself: whoever has no request drafts nothing, and nobody waits for that.
    """
    model_dir: Path = request.getfixturevalue(family)
    expected = hugging_face_tokens(model_dir, PROMPTS, LENGTHS)
    speculative = {"speculative": {"tokens": 6, "draft_source": f"file://{model_dir}"}} if drafts else {}
    engine = eager_drafts_engine.COMMAND if drafts else ENGINE_COMMAND
    given = CONFIG | speculative
    with running_group(tmp_path, model_dir, stage_count, engine_command=engine, **given) as group:
        alone = [group.generate(*case) for case in list(zip(PROMPTS, map(greedy, LENGTHS), strict=True))[:4]]
        assert alone == expected[:4]
        assert group.generate_all(PROMPTS, [greedy(length) for length in LENGTHS]) == expected
        assert by_chance(group) == expected
        assert group.engine_status()["requests_running"] == 0
        if drafts:
            accepted = samples(f"{group.url}/metrics")["stageline_engine_accepted_tokens_total"]
            assert sum(accepted.values()) > 20, accepted
        check_idle_ranks(group, stage_count)


def by_chance(group: RunningGroup) -> list[list[int]]:
    """All requests, at moments that a seed draws; tokens must not depend on them."""
    moments = random.Random(5)
    delays = [moments.random() for _ in PROMPTS]

    def after(index: int) -> list[int]:
        time.sleep(delays[index])
        return group.generate(PROMPTS[index], greedy(LENGTHS[index]))

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(after, range(len(PROMPTS))))


def check_idle_ranks(group: RunningGroup, stage_count: int) -> None:
    """A single request is one rank's; the others run its plans as dummies, and say so in no other way than in time."""
    for stage in range(stage_count):
        found = stage_samples(group, stage)
        exchange = found["stageline_rank_exchange_seconds_total"]
        assert exchange.keys() == {("0",), ("1",)}, exchange
        assert min(exchange.values()) > 0, exchange
        assert found["stageline_stage_busy_seconds_total"]["dummy",] > 0, found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "rank", "number"), [(0, 1, signal.SIGKILL), (1, 0, signal.SIGKILL), (1, 1, signal.SIGSTOP)]
)
def test_a_lost_rank_is_named(stage: int, rank: int, number: signal.Signals, mixtral: Path, tmp_path: Path) -> None:
    """The rank that has the only request, or the one that is idle: whichever it is, it is on record."""
    with running_group(tmp_path, mixtral, 2, timeouts={"step_seconds": STEP_SECONDS}, **CONFIG) as group:
        with open_stream(group, (5, 6, 7), greedy(400)) as stream:
            stream.next_event()
            os.kill(rank_pids(group, stage)[rank], number)
            assert stream.rest()[-1]["type"] == "failed", group.account()
        for name in group.processes:
            group.wait_ended(name)
        words = group.last_words(f"stage-{stage}")
        expected = "Killed" if number is signal.SIGKILL else "StepTimeout"
        assert (words["failure_class"], words["stage"], words["rank"]) == (expected, stage, rank), group.account()


@pytest.mark.thorough
@pytest.mark.parametrize(("stage_count", "stage"), [(1, 0), (2, 1)])
def test_a_rank_that_stands_still_is_named_though_there_is_no_request(
    stage_count: int, stage: int, mixtral: Path, tmp_path: Path
) -> None:
    """Nobody would wait for it but the engine, which doesn't know what its ranks do."""
    settings = CONFIG | {"timeouts": {"step_seconds": STEP_SECONDS}}
    with running_group(tmp_path, mixtral, stage_count, **settings) as group:
        group.wait_until(lambda: 1 in rank_pids(group, stage), "a process of rank 1")
        os.kill(rank_pids(group, stage)[1], signal.SIGSTOP)
        for name in group.processes:
            group.wait_ended(name)
        words = group.last_words(f"stage-{stage}")
        told = (words["failure_class"], words["stage"], words["rank"], words["operation"])
        assert told == ("StepTimeout", stage, 1, "all-reduce, heartbeat"), group.account()


@pytest.mark.parametrize(
    ("write", "ranks", "reason"),
    [(write_tiny_mixtral, 3, "4 experts"), pytest.param(write_tiny_llama, 2, "no experts", marks=pytest.mark.thorough)],
)
def test_what_cannot_be_divided_is_refused(write: Any, ranks: int, reason: str, tmp_path: Path) -> None:
    model_dir = write(tmp_path / "model")
    with running_group(tmp_path / "group", model_dir, 1, start=False, **CONFIG | {"expert": ranks}) as group:
        assert group.wait_ended("engine") == 64, group.account()
        words = group.last_words("engine")
        assert words["failure_class"] == "BadConfig", words
        assert f"spec.parallelism.expert {ranks}" in words["detail"], words
        assert reason in words["detail"], words
