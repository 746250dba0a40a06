"""SIGTERM and `POST /v1/drain` let running streams finish, refuse new requests, and end every process with status 0."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from oracles.pipeline_checks import greedy, open_stream
from processes.multiplexed_client import multiplexed
from processes.running_group import RunningGroup, running_group

WAYS = {
    "engine": "SIGTERM to the engine",
    "stage-0": "SIGTERM to stage 0",
    "stage-1": "SIGTERM to stage 1",
    "http": "POST /v1/drain",
}
"""To tell a group to drain, and what the group then says of it."""


def tell(group: RunningGroup, way: str) -> None:
    if way == "http":
        assert httpx.post(f"{group.url}/v1/drain", timeout=60).status_code == 202
    else:
        group.processes[way].send_signal(signal.SIGTERM)


def assert_all_drained(group: RunningGroup) -> None:
    """A stage that ends by itself, before it has an engine or when told twice, says nothing; the others say why."""
    for name in group.processes:
        assert group.wait_ended(name) == 0, group.account()
        if name == "engine" or (group.directory / f"{name}.termination").exists():
            assert group.last_words(name)["failure_class"] == "Evicted", group.last_words(name)


def assert_all_say(group: RunningGroup, asked_by: str) -> None:
    words = {name: group.last_words(name)["detail"] for name in group.processes}
    assert words == dict.fromkeys(group.processes, f"told to drain by {asked_by}"), group.account()


@pytest.mark.parametrize(
    "told", ["stage-1", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("engine", "http"))]
)
def test_a_drained_group_finishes_its_streams(told: str, tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 2) as group:
        with open_stream(group, (5, 6, 7), greedy(400)) as stream:
            assert stream.next_event()["type"] == "admitted"
            assert stream.next_event()["type"] == "delta"
            tell(group, told)
            group.wait_until(lambda: group.engine_status().get("phase") in ("Draining", None), "draining")
            events = stream.rest()
        assert events[-1]["type"] == "finished"
        assert events[-1]["completion_tokens"] == 400
        assert_all_drained(group)
        assert_all_say(group, WAYS[told])


def test_an_idle_group_drains_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 1) as group:
        for process in group.processes.values():
            process.send_signal(signal.SIGTERM)
        assert_all_drained(group)


def test_a_connection_without_streams_holds_up_no_drain(tiny_llama: Path, tmp_path: Path) -> None:
    """It ends as it should, and the engine doesn't give it the time to read that it gives streams."""

    async def drained_meanwhile(group: RunningGroup) -> None:
        async with httpx.AsyncClient(base_url=group.url) as client, multiplexed(client) as connection:
            tell(group, "engine")
            assert await asyncio.wait_for(connection.rest(), 60) == []
            assert connection.is_whole

    with running_group(tmp_path, tiny_llama, 1) as group:
        asyncio.run(drained_meanwhile(group))
        assert_all_drained(group)
        assert "graceful shutdown exceeded" not in group.log("engine")


@pytest.mark.thorough
def test_a_stage_that_hears_late_of_the_drain_calls_it_no_loss(tiny_llama: Path, tmp_path: Path) -> None:
    """It has a heartbeat to run yet, for which engine and first stage are gone."""
    with running_group(tmp_path, tiny_llama, 2) as group:
        with group.standing_still("stage-1"):
            before = group.stage_status(0)["steps"]
            group.wait_until(lambda: group.stage_status(0)["steps"] > before, "a heartbeat on the first stage")
            tell(group, "engine")
            for name in ("engine", "stage-0"):
                group.wait_ended(name)
        assert_all_drained(group)
        assert_all_say(group, WAYS["engine"])


def test_a_group_told_to_end_before_it_stands(tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 2, start=False, held_back=frozenset({"stage-1"})) as group:
        group.wait_until(lambda: group.engine_status().get("stages_connected") == 1, "a handshake")
        for process in group.processes.values():
            process.send_signal(signal.SIGTERM)
        assert_all_drained(group)


@pytest.mark.parametrize("told", ["http", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("stage-1",))])
def test_a_group_told_to_end_while_it_loads(told: str, stuck_model: Path, tmp_path: Path) -> None:
    """Nobody waits for weights that nobody will use, and a stage that was not told itself calls it no loss."""
    with running_group(tmp_path / "group", stuck_model, 2, start=False) as group:
        group.wait_until(lambda: all(group.stage_status(stage).get("phase") == "Loading" for stage in (0, 1)), "load")
        tell(group, told)
        assert_all_drained(group)
