"""A stage of ranks that is told to end before there is an engine, or twice: it ends well, and at once."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from processes.rank_processes import rank_pids
from processes.running_group import RunningGroup, running_group
from processes.waiting_ranks_stage import HEEDLESS

COMMAND = (str(Path(__file__).parents[2] / "support" / "processes" / "waiting_ranks_stage.py"),)
SETTINGS: dict[str, Any] = {
    "tensor": 3,
    "device": "cuda",  # such ranks need no compiled kernels
    "stage_command": COMMAND,
    "held_back": frozenset({"engine"}),
    "start": False,
}


def wait_for_ranks(group: RunningGroup, what: str, count: int = 3) -> None:
    group.wait_until(lambda: group.log("stage-0").count(what) == count, f"{count} ranks: {what}")


def assert_ended_well(group: RunningGroup, ranks: dict[int, int]) -> None:
    assert group.wait_ended("stage-0") == 0, group.account()
    assert not (group.directory / "stage-0.termination").exists(), group.account()
    assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()], group.account()


def test_its_first_rank_may_not_have_come_so_far_as_to_ask_anybody(tiny_llama: Path, tmp_path: Path) -> None:
    """A signal that ends the rank is no failure of it: the stage had sent it."""
    with running_group(tmp_path, tiny_llama, 1, **SETTINGS) as group:
        wait_for_ranks(group, "waits")
        ranks = rank_pids(group, 0)
        assert ranks.keys() == {0, 1, 2}
        group.processes["stage-0"].send_signal(signal.SIGTERM)
        assert_ended_well(group, ranks)


def test_the_second_time_it_asks_nobody(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEEDLESS, "1")
    with running_group(tmp_path, tiny_llama, 1, **SETTINGS) as group:
        wait_for_ranks(group, "waits")
        ranks = rank_pids(group, 0)
        group.processes["stage-0"].send_signal(signal.SIGTERM)
        wait_for_ranks(group, "has heard", 1)
        assert "rank 0 has heard" in group.log("stage-0"), group.account()
        assert rank_pids(group, 0) == ranks, group.account()
        group.processes["stage-0"].send_signal(signal.SIGTERM)
        assert_ended_well(group, ranks)


def test_a_rank_that_a_signal_ends_unasked_has_failed(tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 1, **SETTINGS) as group:
        wait_for_ranks(group, "waits")
        group.wait_until(lambda: 1 in rank_pids(group, 0), "a process of rank 1")
        os.kill(rank_pids(group, 0)[1], signal.SIGTERM)
        group.wait_ended("stage-0")
        words = group.last_words("stage-0")
        assert (words["failure_class"], words["rank"]) == ("Killed", 1), words
