"""SIGTERM lets running streams finish, refuses new requests, and ends every process with status 0."""

import signal
from pathlib import Path

import pytest

from pipeline_checks import greedy, open_stream
from running_group import RunningGroup, running_group


def assert_all_drained(group: RunningGroup) -> None:
    for name in group.processes:
        assert group.wait_ended(name, 20.0) == 0, group.account()
        assert not (group.directory / f"{name}.termination").exists(), group.last_words(name)


@pytest.mark.parametrize("told", ["engine", "stage-0", "stage-1"])
def test_a_drained_group_finishes_its_streams(told: str, tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 2) as group:
        with open_stream(group, (5, 6, 7), greedy(400)) as stream:
            assert stream.next_event()["type"] == "admitted"
            assert stream.next_event()["type"] == "delta"
            group.processes[told].send_signal(signal.SIGTERM)
            group.wait_until(lambda: group.engine_status().get("phase") in ("Draining", None), "draining", 20.0)
            events = stream.rest()
        assert events[-1]["type"] == "finished"
        assert events[-1]["completion_tokens"] == 400
        assert_all_drained(group)


def test_an_idle_group_drains_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 1) as group:
        for process in group.processes.values():
            process.send_signal(signal.SIGTERM)
        assert_all_drained(group)


def test_a_group_told_to_end_before_it_stands(tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 2, start=False, held_back=frozenset({"stage-1"})) as group:
        group.wait_until(lambda: group.engine_status().get("stages_connected") == 1, "a handshake")
        for process in group.processes.values():
            process.send_signal(signal.SIGTERM)
        assert_all_drained(group)
