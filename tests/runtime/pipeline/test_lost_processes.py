"""Whatever is killed at whatever moment, everything else ends soon, with the right class and the lost peer named."""

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline_checks import OpenStream, greedy, open_stream
from running_group import RunningGroup, running_group, start_process

STAGES = ("stage-0", "stage-1", "stage-2")
EVERYTHING = (*STAGES, "engine")
END_SECONDS = 20.0
CLASS_OF_EXIT_CODE = {70: "RendezvousTimeout", 71: "PeerLost", 72: "StepTimeout", 73: "EngineLost"}


def assert_all_end(group: RunningGroup, killed: str) -> None:
    """Everything but `killed` ends in time and explains itself by what was killed."""
    deadline = time.monotonic() + END_SECONDS
    survivors = [name for name in group.processes if name != killed]
    for name in survivors:
        remaining = max(0.1, deadline - time.monotonic())
        group.wait_until(lambda name=name: group.processes[name].poll() is not None, f"the end of {name}", remaining)  # type: ignore[misc]
    for name in survivors:
        words = group.last_words(name)
        told = f"{name}: {words}\n{group.account()}"
        assert CLASS_OF_EXIT_CODE.get(group.processes[name].returncode) == words["failure_class"], told
        assert words["stage"] == (None if name == "engine" else int(name[-1])), told
        assert words["detail"], told
        assert root_of(group, name) == killed, told
    assert "Traceback" not in "".join(group.log(name) for name in survivors), group.account()


def root_of(group: RunningGroup, name: str) -> str:
    """Who is to blame by `name`'s account: a lost peer names its peer and a lost engine is the engine; follow that."""
    seen: list[str] = []
    while name in group.processes and name not in seen and (group.directory / f"{name}.termination").exists():
        seen.append(name)
        words = group.last_words(name)
        match words["failure_class"]:
            case "PeerLost":
                name = f"stage-{words['peer']}"
            case "EngineLost":
                name = "engine"
            case _:
                return name
    return name


@pytest.mark.parametrize("killed", EVERYTHING)
def test_killed_while_idle(killed: str, tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 3) as group:
        group.kill(killed)
        assert_all_end(group, killed)


@pytest.mark.parametrize("killed", EVERYTHING)
def test_killed_mid_generation(killed: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Streams that were running end with a `failed` event (or break off, when it is the engine that is gone)."""
    with (
        running_group(tmp_path, tiny_llama, 3) as group,
        open_stream(group, (5, 6, 7), greedy(500)) as one,
        open_stream(group, (8, 9), greedy(500)) as other,
    ):
        for stream in (one, other):
            wait_for_tokens(stream)
        group.kill(killed)
        if killed == "engine":
            for stream in (one, other):
                assert_breaks_off(stream)
        else:
            for stream in (one, other):
                last = stream.rest()[-1]
                assert last["type"] == "failed", last
                assert "the group failed: stage " in last["message"], last
        assert_all_end(group, killed)


def wait_for_tokens(stream: OpenStream) -> None:
    assert stream.next_event()["type"] == "admitted"
    assert stream.next_event()["type"] == "delta"


def assert_breaks_off(stream: OpenStream) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        stream.rest()


@pytest.mark.parametrize("killed", ["stage-0", "stage-1", "engine"])
def test_killed_before_its_peers_come(killed: str, tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 3, start=False, held_back=frozenset({"stage-2"})) as group:
        group.wait_until(lambda: group.engine_status().get("stages_connected") == 2, "two handshakes")
        group.kill(killed)
        assert_all_end(group, killed)


@pytest.mark.parametrize("killed", ["stage-0", "stage-1", "engine"])
def test_killed_while_others_wait_at_the_rendezvous(killed: str, tiny_llama: Path, tmp_path: Path) -> None:
    """One stage is held still while the others load and wait for it; then it, or the engine, is killed."""
    still = "stage-1" if killed == "engine" else killed
    last = "stage-2"
    with running_group(tmp_path, tiny_llama, 3, start=False, held_back=frozenset({last})) as group:
        group.wait_until(lambda: group.engine_status().get("stages_connected") == 2, "two handshakes")
        group.processes[still].send_signal(signal.SIGSTOP)
        start_process(group, last)
        waiting = [int(name[-1]) for name in STAGES if name != still]
        group.wait_until(
            lambda: all(group.stage_status(stage).get("phase") == "Rendezvous" for stage in waiting), "loading"
        )
        group.kill(killed)
        if killed == "engine":
            group.processes[still].send_signal(signal.SIGCONT)
        assert_all_end(group, killed)


def test_a_stage_that_never_comes_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    timeouts: dict[str, Any] = {"rendezvous_seconds": 6.0}
    with running_group(
        tmp_path, tiny_llama, 2, start=False, held_back=frozenset({"stage-1"}), timeouts=timeouts
    ) as group:
        assert group.wait_ended("engine") == 70, group.account()
        words = group.last_words("engine")
        assert words["failure_class"] == "RendezvousTimeout"
        assert words["peer"] == 1
        assert "stage 1 did not finish the handshake within 6 s" in words["detail"]
        assert group.wait_ended("stage-0") == 73, group.account()
        assert "stage 1 did not finish the handshake" in group.last_words("stage-0")["detail"]


def test_an_engine_that_never_comes(tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(
        tmp_path, tiny_llama, 1, start=False, held_back=frozenset({"engine"}), timeouts={"rendezvous_seconds": 1.0}
    ) as group:
        assert group.wait_ended("stage-0") == 70, group.account()
        words = group.last_words("stage-0")
        assert words["failure_class"] == "RendezvousTimeout"
        assert "no engine at 127." in words["detail"]
        assert "within 1 s" in words["detail"]


def test_a_stage_that_hangs_is_named_within_the_step_timeout(tiny_llama: Path, tmp_path: Path) -> None:
    with (
        running_group(tmp_path, tiny_llama, 3, timeouts={"step_seconds": 3.0}) as group,
        open_stream(group, (5, 6, 7), greedy(500)) as stream,
    ):
        wait_for_tokens(stream)
        group.processes["stage-1"].send_signal(signal.SIGSTOP)
        assert stream.rest()[-1]["type"] == "failed"
        for name in ("stage-0", "stage-2", "engine"):
            group.wait_ended(name, 3.0 + END_SECONDS)
        words = {name: group.last_words(name) for name in ("stage-0", "stage-2", "engine")}
        timed_out = [each for each in words.values() if each["failure_class"] == "StepTimeout"]
        assert any(each["peer"] == 1 and each["operation"] and each["step"] is not None for each in timed_out), (
            words,
            group.account(),
        )
        for name, each in words.items():
            assert CLASS_OF_EXIT_CODE[group.processes[name].returncode] == each["failure_class"], (words, name)
