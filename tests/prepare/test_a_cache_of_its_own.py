"""A cache that one pod alone uses holds what that pod asks for, and never part of an entry under an entry's name."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes.prepare_process import partials
from stageline_runtime.prepare.cache import entry_problem, prepared_model_dir
from stageline_runtime.prepare.errors import PrepareError
from stageline_runtime.prepare.progress import PlainReporter
from stageline_runtime.prepare.publish import Filled, ensure_entry
from stageline_runtime.prepare.space.make_room import remove_others

SOURCES = tuple(f"hf://org/model-{number}" for number in range(4))
DIES = """
import os, shutil, signal, sys
from pathlib import Path
from stageline_runtime.prepare.space import make_room as evict
from stageline_runtime.prepare.progress import PlainReporter
def dies(path, **_):
    (path / "removed" / "weights").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
shutil.rmtree = dies
evict.remove_others(Path(sys.argv[1]), (), PlainReporter(sys.stderr))
"""


def fill(cache: Path, source: str) -> Path:
    def write(model: Path, _: Path) -> Filled:
        (model / "weights").write_bytes(source.encode() * 100)
        return Filled("a commit")

    return ensure_entry(cache, source, write, PlainReporter(sys.stderr))


def whole(cache: Path) -> set[Path]:
    return {entry for source in SOURCES if entry_problem(entry := prepared_model_dir(source, cache)) is None}


@given(st.lists(st.tuples(st.sampled_from(SOURCES), st.sets(st.sampled_from(SOURCES))), max_size=12))
def test_what_is_asked_for_stays_whole_and_all_else_goes(steps: list[tuple[str, set[str]]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        there: set[Path] = set()
        for source, asked in steps:
            there.add(fill(cache, source))
            (cache / "compiled").mkdir(exist_ok=True)
            kept = {prepared_model_dir(each, cache) for each in asked}
            remove_others(cache, kept, PlainReporter(sys.stderr))
            there &= kept
            assert whole(cache) == there
            assert {each for each in cache.iterdir() if not each.name.startswith(".")} == there | {cache / "compiled"}
            assert partials(cache) == []


def test_who_dies_while_it_removes_leaves_nothing_that_counts(tmp_path: Path) -> None:
    entry = fill(tmp_path, SOURCES[0])
    killed = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not entry.exists()
    assert len(partials(tmp_path)) == 1, "the kill left no leftovers, so there is nothing to test"
    remove_others(tmp_path, (), PlainReporter(sys.stderr))
    assert partials(tmp_path) == []


def test_it_says_what_it_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, SOURCES[0])
    remove_others(tmp_path, (), PlainReporter(sys.stderr))
    assert f"Removed {SOURCES[0]} from the cache" in capsys.readouterr().err


def test_there_may_be_no_cache_yet(tmp_path: Path) -> None:
    remove_others(tmp_path / "none", (), PlainReporter(sys.stderr))
    assert not (tmp_path / "none").exists()


def test_a_cache_that_can_not_be_read_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PrepareError, match=r"cannot make room in the model cache .*not a directory"):
        remove_others(tmp_path / "file", (), PlainReporter(sys.stderr))
