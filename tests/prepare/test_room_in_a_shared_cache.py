"""A cache that several models share stays within its limit: the longest unused go, and never one that is in use."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.tiny_models import write_tiny_llama
from processes.fake_hub import FakeHub, running_hub
from processes.prepare_process import PrepareProcess, partials, wait_until
from stageline_api.failures import ExitCode
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.prepare.cache import bytes_below, cache_key, entry_problem, prepared_model_dir
from stageline_runtime.prepare.errors import PrepareError
from stageline_runtime.prepare.progress import PlainReporter
from stageline_runtime.prepare.publish import Filled, ensure_entry, locked
from stageline_runtime.prepare.space.choice import CachedModel, Space, choose
from stageline_runtime.prepare.space.make_room import FRESH_SECONDS, Room
from stageline_runtime.prepare.space.use import use_file

SOURCES = tuple(f"hf://org/model-{number}" for number in range(4))
KIB = 1024
NOBODY = 65534
HOURS = 3600.0
READS = """
import os, sys, time
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.prepare.space.use import hold_models
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
hold_models(RuntimeConfig.model_validate_json(sys.argv[1]))
print("reads", flush=True)
time.sleep(600)
"""
DIES = """
import os, signal, sys
from pathlib import Path
from stageline_runtime.prepare.progress import PlainReporter
from stageline_runtime.prepare.space import make_room
def dies(path):
    (path / "removed" / "weights").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
make_room.shutil.rmtree = dies
room = make_room.Room(Path(sys.argv[1]), int(sys.argv[2]), PlainReporter(sys.stderr))
with make_room.locked(room.cache_dir, "f" * 32, "a model", room.reporter), room.writing("f" * 32) as need:
    need(int(sys.argv[2]))
"""

model_sizes = st.integers(0, 50)
cached = st.lists(
    st.builds(
        CachedModel,
        key=st.uuids().map(str),
        size_bytes=model_sizes,
        last_use=st.floats(0, 100),
        is_in_use=st.booleans(),
    ),
    max_size=8,
)


@given(cached, st.integers(0, 60), st.integers(0, 200), st.integers(0, 200), st.integers(0, 60), st.floats(0, 100))
def test_the_choice_suffices_takes_no_more_than_it_must_and_never_what_is_in_use_or_fresh(
    models: list[CachedModel], other_bytes: int, limit: int, free: int, needed: int, fresh: float
) -> None:
    space = Space(sum(each.size_bytes for each in models) + other_bytes, free, limit)
    chosen = choose(models, space, needed, now=100.0, fresh_seconds=fresh)

    def missing(freed: int) -> int:
        return max(space.used_bytes + needed - freed - limit, needed - free - freed, 0)

    idle = [each for each in models if not each.is_in_use and 100.0 - each.last_use >= fresh]
    freed = sum(each.size_bytes for each in chosen.removed)
    assert set(chosen.removed) <= set(idle)
    if chosen.short_bytes:
        assert chosen.removed == (), "nothing goes in vain"
        assert chosen.short_bytes == missing(sum(each.size_bytes for each in idle))
        return
    assert missing(freed) == 0
    assert not chosen.removed or missing(freed - chosen.removed[-1].size_bytes) > 0
    newest = max((each.last_use for each in chosen.removed), default=0.0)
    assert all(each.last_use >= newest for each in idle if each not in chosen.removed), "the longest unused first"


@dataclass(frozen=True)
class Repository:
    """A model in a Hub of its own."""

    source: str
    endpoint: str
    size_bytes: int


@pytest.fixture
def tiny_repository(tmp_path: Path) -> Iterator[Callable[[str], Repository]]:
    with contextlib.ExitStack() as stack:

        def serve(name: str) -> Repository:
            directory = write_tiny_llama(tmp_path / name)
            endpoint = stack.enter_context(running_hub(FakeHub(name, directory)))
            return Repository(f"hf://{name}", endpoint, bytes_below(directory))

        yield serve


class SharedCache:
    """A cache directory with a limit, into which models of one size are put."""

    def __init__(self, directory: Path, limit_bytes: int, fresh_seconds: float = 0.0) -> None:
        self.directory = directory
        self.told = io.StringIO()
        self.room = Room(directory, limit_bytes, PlainReporter(self.told), fresh_seconds)

    def put(self, number: int, size_bytes: int = 100 * KIB, last_used_hours_ago: float = 0.0) -> Path:
        source = SOURCES[number]

        def fill(model: Path, _: Path) -> Filled:
            with self.room.writing(cache_key(source)) as need:
                need(size_bytes)
                (model / "weights").write_bytes(b"w" * size_bytes)
            return Filled("a commit")

        entry = ensure_entry(self.directory, source, fill, self.room.reporter)
        use_file(entry).touch()
        set_used(entry, last_used_hours_ago)
        return entry

    def whole(self) -> list[int]:
        """Numbers of the models that are there."""
        entries = ((number, prepared_model_dir(source, self.directory)) for number, source in enumerate(SOURCES))
        return [number for number, entry in entries if entry.exists() and entry_problem(entry) is None]


def set_used(entry: Path, hours_ago: float) -> None:
    at = time.time() - hours_ago * HOURS
    os.utime(use_file(entry), (at, at))


def config_of(source: str, cache: Path, limit_bytes: int | None = None) -> RuntimeConfig:
    return RuntimeConfig(
        model_name="tiny",
        namespace="default",
        served_name="tiny",
        source=source,
        cache_dir=str(cache),
        stage_count=2,
        cache_limit_bytes=limit_bytes,
    )


@contextlib.contextmanager
def reader(config: RuntimeConfig, user: int | None = None) -> Iterator["subprocess.Popen[str]"]:
    """A process that reads a model, as stages and engines do."""
    command = [sys.executable, "-c", READS, config.model_dump_json(), *([] if user is None else [str(user)])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reads\n"
            yield process
        finally:
            process.kill()


def test_the_longest_unused_goes_and_is_named(tmp_path: Path) -> None:
    cache = SharedCache(tmp_path, limit_bytes=350 * KIB)
    for number, hours in ((0, 1.0), (1, 3.0), (2, 2.0)):
        cache.put(number, last_used_hours_ago=hours)
    cache.put(3)
    assert cache.whole() == [0, 2, 3]
    assert f"Removed {SOURCES[1]} from the cache to make room (0.1 MiB, last used " in cache.told.getvalue()
    assert bytes_below(tmp_path) <= 350 * KIB
    assert partials(tmp_path) == []


def test_without_a_limit_nothing_ever_goes(tmp_path: Path) -> None:
    cache = SharedCache(tmp_path, limit_bytes=0)
    cache.room = Room(tmp_path, None, PlainReporter(cache.told), 0.0)
    for number in range(4):
        cache.put(number, last_used_hours_ago=9.0)
    assert cache.whole() == [0, 1, 2, 3]


def test_what_a_process_reads_stays_until_it_is_killed(tmp_path: Path) -> None:
    cache = SharedCache(tmp_path, limit_bytes=250 * KIB)
    read = cache.put(0, last_used_hours_ago=5.0)
    with reader(config_of(SOURCES[0], tmp_path)) as process:
        set_used(read, 5.0)
        cache.put(1, last_used_hours_ago=1.0)
        cache.put(2, last_used_hours_ago=1.0)
        assert cache.whole() == [0, 2], "the one that was used later, since nobody reads it now"
        with pytest.raises(PrepareError, match=r"no room for 0\.2 MiB .*it holds 0\.\d MiB, may hold 0\.2 MiB .*"):
            cache.put(3, size_bytes=200 * KIB)
        assert cache.whole() == [0, 2], "nothing goes in vain"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    set_used(read, 5.0)
    cache.put(3)
    assert cache.whole() == [2, 3]


def test_who_may_not_write_the_cache_holds_what_it_reads() -> None:
    """As a stage does that is given the cache read-only."""
    if os.getuid() != 0:
        pytest.skip("needs root: starts a process of a user that may write nothing")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        root.chmod(0o755)
        cache = SharedCache(root, limit_bytes=150 * KIB)
        read = cache.put(0, last_used_hours_ago=5.0)
        with reader(config_of(SOURCES[0], root), user=NOBODY):
            assert use_file(read).stat().st_mtime < time.time() - HOURS, "it could write, so this tests nothing"
            with pytest.raises(PrepareError, match="no room"):
                cache.put(1)
            assert cache.whole() == [0]
        set_used(read, 5.0)
        cache.put(1)
        assert cache.whole() == [1]


def test_what_was_just_used_stays_although_nobody_reads_it_yet(tmp_path: Path) -> None:
    cache = SharedCache(tmp_path, limit_bytes=150 * KIB, fresh_seconds=FRESH_SECONDS)
    entry = cache.put(0, last_used_hours_ago=0.1)
    with pytest.raises(PrepareError, match="nor has used for 10 minutes"):
        cache.put(1)
    set_used(entry, 0.2)
    cache.put(1)
    assert cache.whole() == [1]


def test_two_writers_do_not_count_on_the_same_room(tmp_path: Path) -> None:
    cache = SharedCache(tmp_path, limit_bytes=150 * KIB)
    other = cache_key(SOURCES[0])
    with locked(tmp_path, other, "a model", cache.room.reporter), cache.room.writing(other) as need:
        need(100 * KIB)
        with pytest.raises(PrepareError, match="no room"):
            cache.put(1)
        # What a writer has written of it is not counted twice.
        partial = tmp_path / f".{other}.partial-x"
        partial.mkdir()
        (partial / "weights").write_bytes(b"w" * 100 * KIB)
        cache.put(1, size_bytes=40 * KIB)
    assert cache.whole() == [1]


def test_what_a_killed_writer_announced_counts_no_more(tmp_path: Path) -> None:
    cache = SharedCache(tmp_path, limit_bytes=150 * KIB)
    (tmp_path / f".{cache_key(SOURCES[0])}.needs").write_text(str(100 * KIB))
    cache.put(1)
    assert cache.whole() == [1]


def test_who_dies_while_it_removes_leaves_nothing_that_counts(tmp_path: Path) -> None:
    cache = SharedCache(tmp_path, limit_bytes=150 * KIB)
    entry = cache.put(0, last_used_hours_ago=5.0)
    command = [sys.executable, "-c", DIES, str(tmp_path), str(150 * KIB)]
    killed = subprocess.run(command, check=False, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not entry.exists()
    assert len(partials(tmp_path)) == 1, "the kill left no leftovers, so there is nothing to test"
    cache.put(1)
    assert partials(tmp_path) == []
    assert cache.whole() == [1]


def test_the_command_makes_room_for_its_group_but_not_of_what_another_group_reads(
    tmp_path: Path, tiny_repository: Callable[[str], Repository]
) -> None:
    """Two models of one Hub, each as large as the limit allows, and a group that runs the first."""
    cache = tmp_path / "cache"
    first, second = tiny_repository("tiny/first"), tiny_repository("tiny/second")
    limit = int(1.5 * first.size_bytes)

    def prepare(repository: Repository) -> tuple[int, str]:
        config = tmp_path / "config.json"
        config.write_text(config_of(repository.source, cache, limit).model_dump_json())
        environment = {"STAGELINE_CONFIG": str(config), "HF_ENDPOINT": repository.endpoint, "HF_TOKEN": ""}
        process = PrepareProcess(tmp_path / "log", [], environment)
        status, _ = process.finish()
        return status, process.told

    assert prepare(first)[0] == 0
    entry = prepared_model_dir(first.source, cache)
    with reader(config_of(first.source, cache, limit)) as running:
        set_used(entry, 5.0)
        status, told = prepare(second)
        assert status == ExitCode.MODEL_LOAD, told
        assert "no room for" in told, told
        assert "spec.model.cache.sizeLimit" in told, told
        running.send_signal(signal.SIGKILL)
        running.wait(timeout=60)
    set_used(entry, 5.0)
    status, told = prepare(second)
    assert status == 0, told
    assert f"Removed {first.source} from the cache to make room" in told, told
    wait_until(lambda: not entry.exists(), lambda: told)
    assert entry_problem(prepared_model_dir(second.source, cache)) is None
