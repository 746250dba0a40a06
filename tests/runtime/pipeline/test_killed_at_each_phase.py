"""Engine, first, middle or last stage killed at load, warm-up or prefill: the others say who it was.

A phase is held by what makes it last, never by a sleep: storage that doesn't answer, a frozen process.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from chaos.group_endings import END_SECONDS, assert_all_end, assert_all_name
from oracles.pipeline_checks import greedy, open_stream, stage_samples
from processes.running_group import RunningGroup, running_group, start_process
from stageline_api import env

FIRST = "stage-0"
ROLES = (("engine", 2), (FIRST, 2), ("stage-1", 2), ("stage-1", 3))
"""Who is killed, of how many stages."""


def roles(*usual: tuple[str, int]) -> pytest.MarkDecorator:
    """Everybody is killed in each phase; `make test` kills the `usual` ones, everybody in one phase or another."""
    cases = [role if role in usual else pytest.param(*role, marks=pytest.mark.soak) for role in ROLES]
    return pytest.mark.parametrize(("killed", "stage_count"), cases)


CHUNK_TOKENS = 16
PROMPT = tuple(3 + index % 50 for index in range(30 * CHUNK_TOKENS))
"""Far more chunks than a group of a few stages has plans in flight."""


@roles(("engine", 2))
def test_killed_while_loading(killed: str, stage_count: int, stuck_model: Path, tmp_path: Path) -> None:
    stages = range(stage_count)
    with running_group(tmp_path / "group", stuck_model, stage_count, start=False) as group:
        group.wait_until(lambda: all(group.stage_status(stage).get("phase") == "Loading" for stage in stages), "load")
        group.kill(killed)
        assert_blamed(group, killed)


def assert_blamed(group: RunningGroup, killed: str) -> None:
    """By every survivor itself; of three stages the last may see the middle one go before it hears why."""
    (assert_all_name if len(group.addresses) == 2 else assert_all_end)(group, killed)


def last_of(group: RunningGroup) -> str:
    """The last stage's name."""
    return f"stage-{len(group.addresses) - 1}"


@contextmanager
def warming_group(directory: Path, model: Path, stage_count: int, patience: float = 60.0) -> Iterator[RunningGroup]:
    """A group whose last stage stands still before the warm-up plan, which the first stage has run already.

    The engine is stopped while the stages load, so that no plan goes out before the last stage is stopped. It alone
    gives a step `patience` seconds: stages on a busy machine need more for their first.
    """
    last, others = stage_count - 1, [f"stage-{stage}" for stage in range(stage_count - 1)]
    held_back = frozenset({f"stage-{last}", "engine"})
    with running_group(
        directory, model, stage_count, start=False, held_back=held_back, timeouts={"step_seconds": 60.0}
    ) as group:
        own = json.loads((directory / "config.json").read_text()) | {"timeouts": {"step_seconds": patience}}
        (directory / "engine.json").write_text(json.dumps(own))
        start_process(group, "engine", **{env.CONFIG: str(directory / "engine.json")})
        group.wait_until(lambda: group.engine_status().get("stages_connected") == last, "the others' handshakes")
        signal_to(group, FIRST, signal.SIGSTOP)
        start_process(group, last_of(group))
        group.wait_until(lambda: group.stage_status(last).get("phase") == "Rendezvous", "the last stage's load")
        signal_to(group, "engine", signal.SIGSTOP)
        signal_to(group, FIRST, signal.SIGCONT)
        loaded = (*others, last_of(group))
        group.wait_until(lambda: all("loaded layers" in group.log(name) for name in loaded), "all loaded")
        signal_to(group, last_of(group), signal.SIGSTOP)
        signal_to(group, "engine", signal.SIGCONT)
        group.wait_until(lambda: group.stage_status(0).get("steps") == 1, "the warm-up plan on the first stage")
        assert group.engine_status()["phase"] == "Warming", group.account()
        yield group


@roles(("stage-1", 2))
def test_killed_while_warming_up(killed: str, stage_count: int, tiny_llama: Path, tmp_path: Path) -> None:
    with warming_group(tmp_path, tiny_llama, stage_count) as group:
        kill_and_let_go(group, killed, frozen=last_of(group))
        assert_blamed(group, killed)


def test_a_stage_that_hangs_in_the_warm_up_ends_the_group(tiny_llama: Path, tmp_path: Path) -> None:
    """The first stage is done with the plan by then, so only the engine can tell."""
    with warming_group(tmp_path, tiny_llama, 2, patience=10.0) as group:
        assert group.wait_ended("engine", 25.0 + END_SECONDS) == 72, group.account()
        words = group.last_words("engine")
        assert words["failure_class"] == "StepTimeout"
        assert "the warm-up step did not finish within" in words["detail"]
        assert group.wait_ended(FIRST, END_SECONDS) == 73, group.account()
        assert "the warm-up step did not finish within" in group.last_words(FIRST)["detail"]


@roles((FIRST, 2))
def test_killed_in_the_middle_of_a_prefill(killed: str, stage_count: int, tiny_llama: Path, tmp_path: Path) -> None:
    """With the last stage frozen the prompt gets as far as plans may run ahead, and no token has been made."""
    chunked: dict[str, Any] = {"max_num_batched_tokens": CHUNK_TOKENS, "prefix_cache": False}
    with running_group(tmp_path, tiny_llama, stage_count, **chunked) as group:
        signal_to(group, last_of(group), signal.SIGSTOP)
        with open_stream(group, PROMPT, greedy(4)) as stream:
            assert stream.next_event()["type"] == "admitted"
            run_ahead = stage_count + 1
            group.wait_until(lambda: num_prefill_steps(group) == run_ahead, f"{run_ahead} chunks on the first stage")
            kill_and_let_go(group, killed, frozen=last_of(group))
            if killed != "engine":
                (last,) = stream.rest()
                assert last["type"] == "failed", last
                assert f"the group failed: stage {killed[-1]}" in last["message"], last
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    stream.rest()
        assert_blamed(group, killed)


def num_prefill_steps(group: RunningGroup) -> float:
    """Chunks that the first stage has computed."""
    return stage_samples(group, 0)["stageline_stage_steps_total"][("prefill",)]


def kill_and_let_go(group: RunningGroup, killed: str, *, frozen: str) -> None:
    """Kill one process; then let the frozen one see it, before another that goes for the engine's loss is lost too."""
    if killed == "engine":
        signal_to(group, FIRST, signal.SIGSTOP)
    group.kill(killed)
    group.wait_ended(killed)
    if frozen != killed:
        signal_to(group, frozen, signal.SIGCONT)
    if killed == "engine":
        group.wait_ended(frozen, END_SECONDS)
        signal_to(group, FIRST, signal.SIGCONT)


def signal_to(group: RunningGroup, name: str, number: signal.Signals) -> None:
    """Stop or continue a process of the group."""
    group.processes[name].send_signal(number)
