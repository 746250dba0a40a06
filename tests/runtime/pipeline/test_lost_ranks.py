"""A rank of a stage killed or stopped in each phase of its life: the stage's last words name the stage and the rank."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oracles.pipeline_checks import greedy, open_stream
from processes.rank_processes import rank_pids
from processes.running_group import RunningGroup, running_group, start_process

CONFIG: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "tensor": 2}
PROMPT = (5, 6, 7)
STEP_SECONDS = 8.0


def pid_of(group: RunningGroup, stage: int, rank: int) -> int:
    group.wait_until(lambda: rank in rank_pids(group, stage), f"a process of rank {rank}")
    return rank_pids(group, stage)[rank]


def assert_named(group: RunningGroup, stage: int, rank: int, failure_class: str) -> None:
    """The stage says which rank it was; all others end because of it, and nothing stays behind."""
    for name in group.processes:
        group.wait_ended(name)
    words = group.last_words(f"stage-{stage}")
    told = (words["failure_class"], words["stage"], words["rank"])
    assert told == (failure_class, stage, rank), f"{words}\n{group.account()}"
    for other in set(range(len(group.addresses))) - {stage}:
        words = group.last_words(f"stage-{other}")
        assert words["failure_class"] in ("PeerLost", "EngineLost", "StepTimeout"), f"{words}\n{group.account()}"
        assert words["peer"] in (None, stage), words
    assert not any(rank_pids(group, each) for each in range(len(group.addresses)))
    assert "Traceback" not in "".join(group.log(name) for name in group.processes), group.account()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_killed_while_loading(rank: int, stuck_model: Path, tmp_path: Path) -> None:
    with running_group(tmp_path / "group", stuck_model, 1, start=False, **CONFIG) as group:
        group.wait_until(lambda: group.stage_status(0).get("phase") == "Loading", "loading")
        os.kill(pid_of(group, 0, rank), signal.SIGKILL)
        assert_named(group, 0, rank, "Killed")


@pytest.mark.parametrize(
    ("stage", "rank"),
    [pytest.param(0, 1, marks=pytest.mark.soak), (1, 0), pytest.param(1, 1, marks=pytest.mark.soak)],
)
def test_killed_while_it_serves(stage: int, rank: int, tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 2, **CONFIG) as group:
        with open_stream(group, PROMPT, greedy(500)) as stream:
            stream.next_event()
            os.kill(pid_of(group, stage, rank), signal.SIGKILL)
            assert stream.rest()[-1]["type"] == "failed", group.account()
        assert_named(group, stage, rank, "Killed")


@pytest.mark.parametrize("phase", ["starting", "idle"])
def test_killed_at_rest(phase: str, tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 2, start=phase == "idle", **CONFIG) as group:
        os.kill(pid_of(group, 1, 1), signal.SIGKILL)
        assert_named(group, 1, 1, "Killed")


def let_go_of(pids: dict[int, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGCONT)


@contextmanager
def meeting_group(directory: Path, model: Path, *, held_back: frozenset[str]) -> Iterator[RunningGroup]:
    """The second stage's ranks wait at the rendezvous for the first one's, which stand still since their handshakes."""
    timeouts = {"step_seconds": 60.0}
    with running_group(directory, model, 2, start=False, held_back=held_back, timeouts=timeouts, **CONFIG) as group:
        if "engine" in held_back:
            start_process(group, "engine")
        group.wait_until(lambda: group.engine_status().get("stages_connected") == 1, "the first stage's handshakes")
        for pid in rank_pids(group, 0).values():
            os.kill(pid, signal.SIGSTOP)
        start_process(group, "stage-1")
        group.wait_until(lambda: group.stage_status(1).get("phase") == "Rendezvous", "the second stage's load")
        yield group


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_the_rendezvous(rank: int, tiny_llama: Path, tmp_path: Path) -> None:
    with meeting_group(tmp_path, tiny_llama, held_back=frozenset({"stage-1"})) as group:
        os.kill(pid_of(group, 1, rank), signal.SIGKILL)
        group.wait_ended("stage-1")
        let_go_of(rank_pids(group, 0))
        assert_named(group, 1, rank, "Killed")


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_while_warming_up(rank: int, tiny_llama: Path, tmp_path: Path) -> None:
    """The engine stands still until one rank of the second stage does, so that the warm-up can't get past it."""
    with meeting_group(tmp_path, tiny_llama, held_back=frozenset({"stage-1", "engine"})) as group:
        with group.standing_still("engine"):
            let_go_of(rank_pids(group, 0))
            stages = ("stage-0", "stage-1")
            group.wait_until(lambda: all(group.log(name).count("loaded layers") == 2 for name in stages), "all loaded")
            os.kill(pid_of(group, 1, rank), signal.SIGSTOP)
        group.wait_until(lambda: group.stage_status(0).get("steps") == 1, "the warm-up plan on the first stage")
        assert group.engine_status()["phase"] == "Warming", group.account()
        os.kill(pid_of(group, 1, rank), signal.SIGKILL)
        assert_named(group, 1, rank, "Killed")


def test_killed_while_the_group_drains(tiny_llama: Path, tmp_path: Path) -> None:
    """The stage that lost it says so; for the others the group was about to end."""
    with running_group(tmp_path, tiny_llama, 2, **CONFIG) as group, open_stream(group, PROMPT, greedy(500)) as stream:
        stream.next_event()
        group.processes["stage-1"].send_signal(signal.SIGTERM)
        group.wait_until(lambda: group.engine_status().get("phase") == "Draining", "the drain")
        os.kill(pid_of(group, 0, 1), signal.SIGKILL)
        assert stream.rest()[-1]["type"] == "failed", group.account()
        for name in group.processes:
            group.wait_ended(name)
        words = group.last_words("stage-0")
        assert (words["failure_class"], words["stage"], words["rank"]) == ("Killed", 0, 1), group.account()


@pytest.mark.parametrize(
    ("stage", "rank"), [(0, 1), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((0, 0), (1, 0), (1, 1)))]
)
def test_a_stopped_rank_is_found_by_the_watchdogs(stage: int, rank: int, tiny_llama: Path, tmp_path: Path) -> None:
    """It is named by a rank that waits for it in an exchange, not by itself."""
    with running_group(tmp_path, tiny_llama, 2, timeouts={"step_seconds": STEP_SECONDS}, **CONFIG) as group:
        with open_stream(group, PROMPT, greedy(500)) as stream:
            stream.next_event()
            os.kill(pid_of(group, stage, rank), signal.SIGSTOP)
            assert stream.rest()[-1]["type"] == "failed", group.account()
        assert_named(group, stage, rank, "StepTimeout")
        words = group.last_words(f"stage-{stage}")
        assert f"(without rank {rank}) took longer than {STEP_SECONDS:g} s" in words["detail"], words
        assert words["operation"].startswith("all-"), words


@pytest.mark.parametrize(
    ("stage_count", "stage", "rank"),
    [(1, 0, 1), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, 0, 0), (2, 0, 1), (2, 1, 1)))],
)
def test_a_rank_that_stands_still_is_named_though_there_is_no_request(
    stage_count: int, stage: int, rank: int, tiny_llama: Path, tmp_path: Path
) -> None:
    """The ranks of each stage meet in the heartbeats of an idle group."""
    settings = CONFIG | {"timeouts": {"step_seconds": STEP_SECONDS}}
    with running_group(tmp_path, tiny_llama, stage_count, **settings) as group:
        os.kill(pid_of(group, stage, rank), signal.SIGSTOP)
        assert_named(group, stage, rank, "StepTimeout")
        words = group.last_words(f"stage-{stage}")
        assert words["operation"] == "all-reduce, heartbeat", words
        assert f"(without rank {rank}) took longer than {STEP_SECONDS:g} s" in words["detail"], words


def test_ranks_end_with_their_supervisor(tiny_llama: Path, tmp_path: Path) -> None:
    """Each an interpreter of its own, as in a pod."""
    with running_group(tmp_path, tiny_llama, 1, is_fresh=True, **CONFIG) as group:
        ranks = [pid_of(group, 0, rank) for rank in (0, 1)]
        group.kill("stage-0")
        group.wait_until(lambda: not any(_runs(pid) for pid in ranks), "the end of the ranks")
        assert group.wait_ended("engine") == 71, group.account()
        assert group.last_words("engine")["peer"] == 0


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
