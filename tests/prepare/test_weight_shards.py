"""Weights in shards: preparation leaves them to the stages, and each stage fetches those of its tensors, once."""

import io
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oracles.sharded_models import SHARDS, shard_four_layers
from oracles.tiny_models import add_head, write_tiny_gemma2, write_tiny_llama
from processes.fake_hub import PAUSE_SECONDS, FakeHub, running_hub
from processes.prepare_process import PrepareProcess, partials, wait_until
from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_api.resource.serving.model_source import parse_source
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.models.coverage.cut import load_cut
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.models.weights.checkpoint import check_shapes
from stageline_runtime.models.weights.stage_weights import checkpoint_form, stage_tensors
from stageline_runtime.prepare.errors import PrepareError
from stageline_runtime.prepare.progress import PlainReporter
from stageline_runtime.prepare.sources import prepare_source
from stageline_runtime.stage.failures import as_failure
from stageline_runtime.stage.own_shards import ensure_own_shards
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.stage.telemetry.state_clock import StateClock, Timeline

REPO = "tiny/sharded"
SOURCE = f"hf://{REPO}"
TOKEN = "hf_not_a_real_token_but_secret"
LAYERS = (LayerRange(first=0, last=1), LayerRange(first=2, last=3))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shard_four_layers(write_tiny_llama(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shard_four_layers(write_tiny_llama(tmp_path_factory.mktemp("tied")))


@pytest.fixture(scope="module")
def tied_beside_a_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shard_four_layers(add_head(write_tiny_llama(tmp_path_factory.mktemp("head")), equal=False))


@pytest.fixture
def hub(untied: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub(REPO, untied)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub(fake) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        # Of the processes to come: a client that gave up a paused transfer would ask for the file again.
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", f"{PAUSE_SECONDS:g}")
        yield fake
        fake.go_on.set()


def init_container(cache: Path) -> Path:
    """What a pod's `prepare` does; returns the entry."""
    return prepare_source(parse_source(SOURCE), cache, PlainReporter(io.StringIO()), with_shards=False)


def start_stage(entry: Path, stage: int) -> StageProgress:
    """What stage `stage` of two does before it reads its weights."""
    timeline = Timeline()
    clock = StateClock(listener=timeline.mark)
    progress = StageProgress(stage=stage, stage_count=2, incarnation=1, clock=clock, timeline=timeline)
    shape = StageShape(
        layers=LAYERS[stage],
        is_first=stage == 0,
        is_last=stage == 1,
        dtype=torch.float32,
        num_cohorts=2,
        num_slots=2,
        slot_tokens=16,
    )
    ensure_own_shards(SOURCE, entry, read_model_config(entry), shape, progress)
    return progress


def told(processes: list[PrepareProcess]) -> str:
    return "".join(each.told for each in processes)


def held(entry: Path) -> set[str]:
    return {path.name for path in entry.glob("*.safetensors")}


@pytest.mark.parametrize("kind", ["untied", "tied", "tied_beside_a_head"])
def test_two_stages_with_caches_of_their_own_hold_only_their_shards(
    kind: str, hub: FakeHub, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    hub.directory = request.getfixturevalue(kind)
    own = ({SHARDS[0], SHARDS[1]}, {SHARDS[1], SHARDS[2]} | ({SHARDS[0]} if kind == "tied" else set()))
    for stage, expected in enumerate(own):
        entry = init_container(tmp_path / str(stage))
        assert held(entry) == set(), "the init container knows no cut, so it fetches no weights"
        before = len(hub.downloads())
        progress = start_stage(entry, stage)
        assert sorted(hub.downloads()[before:]) == sorted(expected)
        assert held(entry) == expected
        assert (progress.phase, progress.message) == (Phase.LOADING, "")
        config = read_model_config(entry)
        form = checkpoint_form(entry)
        own_tensors = stage_tensors(config, LAYERS[stage], form, has_embedding=stage == 0, has_head=stage == 1)
        check_shapes(entry, {name: tensor.shape for name, tensor in own_tensors.items()})
        for name in expected:
            assert (entry / name).read_bytes() == (hub.directory / name).read_bytes(), name


def test_a_person_gets_the_whole_model(hub: FakeHub, tmp_path: Path) -> None:
    entry = init_container(tmp_path)
    start_stage(entry, 0)
    assert prepare_source(parse_source(SOURCE), tmp_path, PlainReporter(io.StringIO())) == entry
    assert held(entry) == set(SHARDS)
    downloads = hub.downloads()
    assert all(downloads.count(name) == 1 for name in SHARDS), downloads


@pytest.mark.thorough
def test_a_start_with_a_full_cache_asks_nobody(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_stage(init_container(tmp_path), 1)
    count = len(hub.requests)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start_stage(init_container(tmp_path), 1)
    assert len(hub.requests) == count
    with pytest.raises(PrepareError, match=f"cannot fetch {SHARDS[0]}: .*the Hub can't be reached"):
        start_stage(init_container(tmp_path), 0)


def test_the_stage_sends_the_token_and_never_shows_it(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with caplog.at_level(logging.DEBUG):
        entry = init_container(tmp_path)
        start_stage(entry, 0)
        hub.token = "another"
        with pytest.raises(PrepareError, match=f"{SHARDS[2]}: .*used the token in HF_TOKEN") as refusal:
            start_stage(entry, 1)
    assert {authorization for _, _, authorization in hub.requests} == {f"Bearer {TOKEN}"}
    assert TOKEN not in refusal.value.message + caplog.text
    assert f"Downloading {SHARDS[0]}" in caplog.text


def test_a_shard_that_is_gone_or_changed_is_named_and_may_be_tried_again(
    hub: FakeHub, untied: Path, tmp_path: Path
) -> None:
    entry = init_container(tmp_path / "cache")
    hub.corrupt = SHARDS[2]
    with pytest.raises(PrepareError, match=f"cannot fetch {SHARDS[2]}: .*does not match the SHA-256") as refusal:
        start_stage(entry, 1)
    assert as_failure(refusal.value).failure_class is FailureClass.MODEL_LOAD
    assert held(entry) == {SHARDS[1]}
    without = tmp_path / "without"
    without.mkdir()
    for path in untied.iterdir():
        if path.name != SHARDS[2]:
            (without / path.name).write_bytes(path.read_bytes())
    hub.directory = without
    with pytest.raises(PrepareError, match=f"cannot fetch {SHARDS[2]}: .*lost a file") as refusal:
        start_stage(entry, 1)
    assert as_failure(refusal.value).failure_class is FailureClass.MODEL_LOAD
    assert partials(entry.parent) == []
    hub.corrupt, hub.directory = None, untied
    (entry / SHARDS[1]).write_bytes(b"cut short")
    start_stage(entry, 1)
    assert (entry / SHARDS[1]).read_bytes() == (untied / SHARDS[1]).read_bytes()
    assert held(entry) == {SHARDS[1], SHARDS[2]}


def test_a_fetch_killed_within_a_shard_leaves_nothing_that_looks_whole(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    entry = init_container(cache)
    hub.pause_in = SHARDS[1]
    killed = PrepareProcess(tmp_path / "killed.log", ["--source", SOURCE, "--cache-dir", str(cache)], {})
    try:
        wait_until(lambda: hub.downloads().count(SHARDS[1]) == 1, lambda: killed.told)
        assert held(entry) == {SHARDS[0]}
        killed.send(signal.SIGKILL)
        assert killed.finish()[0] == -signal.SIGKILL
    finally:
        killed.end()
    assert held(entry) == {SHARDS[0]}
    assert len(partials(cache)) == 1, "the kill left no leftovers, so there is nothing to test"
    hub.pause_in = None
    start_stage(entry, 0)
    assert held(entry) == {SHARDS[0], SHARDS[1]}
    assert partials(cache) == []
    downloads = hub.downloads()
    assert [downloads.count(name) for name in SHARDS] == [1, 2, 0], downloads


def test_of_two_that_need_a_shard_at_the_same_time_one_fetches_it(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    entry = init_container(cache)
    hub.pause_in = SHARDS[1]
    arguments = ["--source", SOURCE, "--cache-dir", str(cache)]
    both = [PrepareProcess(tmp_path / f"{name}.log", arguments, {}) for name in ("one", "other")]
    try:
        waits = f"Another process is preparing {SHARDS[1]}"
        # Who has the lock may not have asked for the file yet.
        wait_until(lambda: waits in told(both) and SHARDS[1] in hub.downloads(), lambda: told(both))
        hub.go_on.set()
        assert [each.finish()[0] for each in both] == [0, 0], told(both)
    finally:
        for each in both:
            each.end()
    downloads = hub.downloads()
    assert [downloads.count(name) for name in SHARDS] == [1, 1, 1], downloads
    assert held(entry) == set(SHARDS)
    assert partials(cache) == []


def test_of_a_model_whose_sizes_only_its_weights_tell_the_headers_come_first(hub: FakeHub, tmp_path: Path) -> None:
    hub.directory = shard_four_layers(write_tiny_gemma2(tmp_path / "gemma2", num_layers=4))
    entry = init_container(tmp_path / "cache")
    assert held(entry) == set()
    assert sorted(path.rpartition("/")[2] for method, path, _ in hub.requests if method == "PEEK") == list(SHARDS)
    measured = read_model_config(entry).measured
    assert measured is not None
    assert measured == read_model_config(hub.directory).measured
    for stage, expected in enumerate(({SHARDS[0], SHARDS[1]}, {SHARDS[0], SHARDS[1], SHARDS[2]})):
        start_stage(entry, stage)
        assert held(entry) == expected, "the last stage of tied ends holds the embedding too"
    config = read_model_config(entry)
    assert config.measured == measured
    cut = load_cut(entry, LAYERS[1], is_first=False, is_last=True, dtype=torch.float32, progress=lambda *_: None)
    assert cut.kept


def test_an_index_that_names_a_file_the_repository_lacks_is_refused(hub: FakeHub, untied: Path, tmp_path: Path) -> None:
    hub.directory = tmp_path / "lacking"
    hub.directory.mkdir()
    for path in untied.iterdir():
        if path.name != SHARDS[1]:
            (hub.directory / path.name).write_bytes(path.read_bytes())
    with pytest.raises(PrepareError, match=f"names {SHARDS[1]}, which the repository does not hold"):
        init_container(tmp_path / "cache")
