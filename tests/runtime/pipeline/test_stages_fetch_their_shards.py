"""A group whose weights are still on the Hub: its stages fetch their shards while they load, and answer as ever."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oracles.pipeline_checks import draw_prompts, greedy, hugging_face_tokens
from oracles.sharded_models import SHARDS, shard_four_layers
from oracles.tiny_models import VOCAB_SIZE, write_tiny_gemma2, write_tiny_llama
from processes.fake_hub import PAUSE_SECONDS, FakeHub, running_hub
from processes.running_group import RunningGroup, running_group
from stageline_api.resource.serving.model_source import parse_source
from stageline_runtime.prepare.progress import reporter_for
from stageline_runtime.prepare.sources import prepare_source

SOURCE = "hf://tiny/sharded"
CUT = ({"first": 0, "last": 1}, {"first": 2, "last": 3})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    repository = shard_four_layers(write_tiny_llama(tmp_path / "repository", tie_word_embeddings=False))
    fake = FakeHub("tiny/sharded", repository)
    with running_hub(fake) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", f"{PAUSE_SECONDS:g}")
        yield fake
        fake.go_on.set()


def prepared(cache: Path) -> Path:
    return prepare_source(parse_source(SOURCE), cache, reporter_for(), with_shards=False)


def loading(group: RunningGroup) -> list[str]:
    """What the stages say while they load."""
    told = [group.stage_status(stage) for stage in range(2)]
    return [status["message"] for status in told if status.get("phase") == "Loading"]


def one_fetches_and_one_waits(told: list[str]) -> bool:
    marks = (f"Downloading {SHARDS[1]}", f"Another process is preparing {SHARDS[1]}")
    return all(any(mark in each for each in told) for mark in marks)


def test_tokens_are_those_of_the_whole_model_and_each_shard_is_fetched_once(hub: FakeHub, tmp_path: Path) -> None:
    prompts = draw_prompts(6, VOCAB_SIZE, 40)
    samplings = [greedy(12)] * len(prompts)
    cache = tmp_path / "cache"
    entry = prepared(cache)
    hub.pause_in = SHARDS[1]
    config: dict[str, Any] = {"source": SOURCE, "cache_dir": str(cache), "stage_layers": CUT}
    with running_group(tmp_path / "sharded", entry, 2, start=False, **config) as group:
        group.wait_until(lambda: one_fetches_and_one_waits(loading(group)), "one fetch and one wait")
        hub.go_on.set()
        group.wait_ready()
        answers = group.generate_all(prompts, samplings)
    downloads = hub.downloads()
    assert [downloads.count(name) for name in SHARDS] == [1, 1, 1], downloads
    whole = write_tiny_llama(tmp_path / "whole", tie_word_embeddings=False)
    with running_group(tmp_path / "unsharded", whole, 2, stage_layers=CUT) as group:
        assert group.generate_all(prompts, samplings) == answers


@pytest.mark.thorough
def test_a_covered_model_is_cut_by_headers_and_its_stages_fetch_the_rest(hub: FakeHub, tmp_path: Path) -> None:
    hub.directory = shard_four_layers(write_tiny_gemma2(tmp_path / "gemma2", num_layers=4))
    prompts = draw_prompts(4, VOCAB_SIZE, 40)
    expected = hugging_face_tokens(hub.directory, prompts, [6] * len(prompts))
    cache = tmp_path / "cache"
    entry = prepared(cache)
    assert not list(entry.glob("*.safetensors"))
    config: dict[str, Any] = {"source": SOURCE, "cache_dir": str(cache), "dtype": "float32"}
    with running_group(tmp_path / "group", entry, 2, **config) as group:
        assert group.generate_all(prompts, [greedy(6)] * len(prompts)) == expected, group.account()
    downloads = hub.downloads()
    assert [downloads.count(name) for name in SHARDS] == [1, 1, 1], downloads


def test_a_shard_that_can_not_be_had_ends_the_stage_that_needs_it(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    entry = prepared(cache)
    (hub.directory / SHARDS[2]).unlink()
    config: dict[str, Any] = {"source": SOURCE, "cache_dir": str(cache), "stage_layers": CUT}
    with running_group(tmp_path / "group", entry, 2, start=False, **config) as group:
        assert group.wait_ended("stage-1") == 65, group.account()
        words = group.last_words("stage-1")
        assert words["failure_class"] == "ModelLoad"
        assert words["operation"] == "fetch weights"
        assert f"cannot fetch {SHARDS[2]}" in words["detail"]
        assert "Traceback" not in group.log("stage-1")
        assert group.wait_ended("engine") == 71, group.account()
        assert group.last_words("engine")["peer"] == 1
