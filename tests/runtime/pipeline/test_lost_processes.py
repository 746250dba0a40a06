"""Whatever is killed at whatever moment, everything else ends soon, with the right class and the lost peer named."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from chaos.group_endings import CLASS_OF_EXIT_CODE, END_SECONDS, assert_all_end
from oracles.pipeline_checks import OpenStream, greedy, open_stream
from processes.running_group import running_group, start_process
from stageline_api import env

STAGES = ("stage-0", "stage-1", "stage-2")
STEP_SECONDS = 8.0
"""Longer than a busy machine holds up any step that is not stopped."""
SLOW_STAGE = ("-m", "stageline_bench.runtime.group.paced_stage", "0.1", "0")
"""500 tokens of three of them take minutes, so that no answer ends before its test has disturbed it."""


def victims(*usual: str, among: Sequence[str] = ("stage-1", "stage-2", "engine")) -> pytest.MarkDecorator:
    """Everybody `among` is killed; `make test` kills the `usual` ones."""
    cases = [name if name in usual else pytest.param(name, marks=pytest.mark.thorough) for name in among]
    return pytest.mark.parametrize("killed", cases)


@victims("stage-1")
def test_killed_while_idle(killed: str, tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 3) as group:
        group.kill(killed)
        assert_all_end(group, killed)


@victims("stage-2")
def test_killed_mid_generation(killed: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Streams that were running end with a `failed` event (or break off, when it is the engine that is gone)."""
    with (
        running_group(tmp_path, tiny_llama, 3, stage_command=SLOW_STAGE) as group,
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


@victims(among=("stage-0", "engine"))
def test_killed_before_its_peers_come(killed: str, tiny_llama: Path, tmp_path: Path) -> None:
    with running_group(tmp_path, tiny_llama, 3, start=False, held_back=frozenset({"stage-2"})) as group:
        group.wait_until(lambda: group.engine_status().get("stages_connected") == 2, "two handshakes")
        group.kill(killed)
        assert_all_end(group, killed)


@victims(among=("stage-1", "engine"))
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
            # Were it to come while the others go one by one, stage 0 could lose a peer without knowing which.
            for stage in waiting:
                group.wait_ended(STAGES[stage], END_SECONDS)
            group.processes[still].send_signal(signal.SIGCONT)
        assert_all_end(group, killed)


@pytest.mark.thorough
def test_a_stage_that_never_comes_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    """The engine alone is in a hurry, and starts once the stage that does come looks for it."""
    held_back = frozenset({"stage-1", "engine"})
    with running_group(tmp_path, tiny_llama, 2, start=False, held_back=held_back) as group:
        hurried = json.loads((tmp_path / "config.json").read_text()) | {"timeouts": {"rendezvous_seconds": 20.0}}
        (tmp_path / "hurried.json").write_text(json.dumps(hurried))
        group.wait_until(lambda: group.stage_status(0).get("phase") == "Connecting", "stage 0 looks for the engine")
        start_process(group, "engine", **{env.CONFIG: str(tmp_path / "hurried.json")})
        assert group.wait_ended("engine") == 70, group.account()
        words = group.last_words("engine")
        assert words["failure_class"] == "RendezvousTimeout"
        assert words["peer"] == 1
        assert "stage 1 did not finish the handshake within 20 s" in words["detail"]
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
        running_group(
            tmp_path, tiny_llama, 3, stage_command=SLOW_STAGE, timeouts={"step_seconds": STEP_SECONDS}
        ) as group,
        open_stream(group, (5, 6, 7), greedy(500)) as stream,
    ):
        wait_for_tokens(stream)
        group.processes["stage-1"].send_signal(signal.SIGSTOP)
        assert stream.rest()[-1]["type"] == "failed"
        for name in ("stage-0", "stage-2", "engine"):
            group.wait_ended(name, STEP_SECONDS + END_SECONDS)
        words = {name: group.last_words(name) for name in ("stage-0", "stage-2", "engine")}
        timed_out = [each for each in words.values() if each["failure_class"] == "StepTimeout"]
        assert any(each["peer"] == 1 and each["operation"] and each["step"] is not None for each in timed_out), (
            words,
            group.account(),
        )
        for name, each in words.items():
            assert CLASS_OF_EXIT_CODE[group.processes[name].returncode] == each["failure_class"], (words, name)
