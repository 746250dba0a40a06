"""What a running group of three stages does for its requests, and what it says about itself meanwhile."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from oracles.pipeline_checks import draw_prompts, greedy, open_stream, samples, stage_samples, wait_all_counted
from oracles.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE
from processes.running_group import RunningGroup, page, running_group
from stageline_api.engine_http import SamplingParams

PROMPT = (40, 41, 42, 43)
STAGE_COUNT = 3


@pytest.fixture(scope="module")
def group(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    """A group with three slots, one per cohort."""
    with running_group(tmp_path_factory.mktemp("group"), tiny_llama, STAGE_COUNT, max_num_seqs=3) as running:
        yield running


def test_closing_a_stream_frees_its_slot(group: RunningGroup) -> None:
    """Three streams hold all slots and a fourth waits; each closed one makes room."""
    # With a stage that stands still it can't end by itself before its slot has been seen.
    with group.standing_still("stage-2"), open_stream(group, PROMPT, greedy(500)) as first:
        assert first.next_event().items() >= {"type": "admitted", "prompt_tokens": len(PROMPT)}.items()
        group.wait_until(lambda: group.engine_status()["requests_running"] == 1, "the stream holds a slot")
    group.wait_until(lambda: group.engine_status()["requests_running"] == 0, "the slot is freed")
    assert samples(f"{group.url}/metrics")["stageline_kv_cache_usage_ratio"] == {(): 0.0}
    expected = group.generate(PROMPT, greedy(5))
    assert len(expected) == 5
    with open_stream(group, PROMPT, greedy(500)), open_stream(group, PROMPT, greedy(500)):
        assert group.generate(PROMPT, greedy(5)) == expected


def test_an_engine_takes_no_core_from_a_stage(group: RunningGroup) -> None:
    """All threads of the engine wait for a stage that shares a core with them to end its slice; stages are as usual."""
    policies = {name: _policies(process.pid) for name, process in group.processes.items()}
    assert policies.pop("engine") == {os.SCHED_BATCH}
    assert policies == {f"stage-{stage}": {os.SCHED_OTHER} for stage in range(STAGE_COUNT)}


def _policies(process: int) -> set[int]:
    """Scheduling classes of its threads."""
    return {os.sched_getscheduler(int(thread.name)) for thread in Path(f"/proc/{process}/task").iterdir()}


def test_max_tokens_and_stop_ids_end_a_stream(group: RunningGroup) -> None:
    tokens = group.generate(PROMPT, greedy(12))
    assert len(tokens) == 12
    stop = next(token for index, token in enumerate(tokens) if token not in tokens[:index] and index >= 2)
    with open_stream(group, PROMPT, SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,))) as stream:
        events = stream.rest()
    assert events[0]["type"] == "admitted"
    assert events[-1]["type"] == "finished"
    assert events[-1]["reason"] == "stop"
    assert events[-1]["completion_tokens"] == tokens.index(stop) + 1
    with open_stream(group, PROMPT, greedy(1)) as stream:
        events = stream.rest()
    assert [events[-1]["reason"], events[-1]["completion_tokens"]] == ["length", 1]


def test_a_prompt_may_fill_the_context(group: RunningGroup) -> None:
    """Position by position up to the last slot of the cache; one token more is refused."""
    prompt = draw_prompts(10, VOCAB_SIZE, 509)[9]
    assert len(prompt) == 509
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    assert len(group.generate(prompt, sampling)) == 3


@pytest.mark.thorough
def test_end_of_sequence_is_respected_unless_ignored(group: RunningGroup) -> None:
    """At a high temperature a vocabulary of 269 tokens reaches end-of-sequence within a few hundred tokens."""
    respecting = [SamplingParams(temperature=2.0, max_tokens=300, seed=seed) for seed in range(6)]
    ignoring = SamplingParams(temperature=2.0, max_tokens=300, ignore_eos=True)
    *answers, whole = group.generate_all([PROMPT] * 7, [*respecting, ignoring])
    ended = 0
    for seed, tokens in enumerate(answers):
        assert EOS_TOKEN_ID not in tokens[:-1], f"seed {seed} went on after end-of-sequence: {tokens}"
        ended += tokens[-1] == EOS_TOKEN_ID
    assert len(whole) == 300
    assert ended, "no seed reached end-of-sequence; choose others"


def test_state_seconds_sum_to_wall_time_under_load(group: RunningGroup) -> None:
    prompts = draw_prompts(12, VOCAB_SIZE, 120)
    wait_all_counted(group)
    before = [stage_samples(group, stage) for stage in range(STAGE_COUNT)]
    group.generate_all(prompts, [greedy(30)] * len(prompts))
    wait_all_counted(group)
    # The last sample is never an input; rows that ran dead after an end would only add to this.
    inputs = sum(len(prompt) + 30 - 1 for prompt in prompts)
    for stage in range(STAGE_COUNT):
        after = stage_samples(group, stage)
        states = ("busy", "wait", "idle")
        total = sum(sum(after[f"stageline_stage_{state}_seconds_total"].values()) for state in states)
        wall = after["stageline_stage_wall_seconds_total"][()]
        assert total == pytest.approx(wall, rel=0.01), f"stage {stage}: {after}"
        busy = after["stageline_stage_busy_seconds_total"]
        assert busy[("decode",)] > before[stage]["stageline_stage_busy_seconds_total"][("decode",)]
        assert tokens_run(after) - tokens_run(before[stage]) == inputs, f"stage {stage}: {after}"


def tokens_run(samples_of_stage: dict[str, dict[tuple[str, ...], float]]) -> float:
    return sum(samples_of_stage["stageline_stage_tokens_total"].values())


def test_engine_counts_tokens(group: RunningGroup) -> None:
    before = group.engine_status()
    group.generate(PROMPT, greedy(7))
    after = group.engine_status()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 7
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == len(PROMPT)


def test_status_says_what_everyone_holds(group: RunningGroup) -> None:
    engine = group.engine_status()
    assert (engine["phase"], engine["stages_connected"], engine["stages_ready"]) == ("Ready", STAGE_COUNT, STAGE_COUNT)
    next_layer = 0
    for stage in range(STAGE_COUNT):
        status = group.stage_status(stage)
        assert status["phase"] == "Ready"
        assert status["layers"]["first"] == next_layer
        next_layer = status["layers"]["last"] + 1
        assert 0 < status["loaded_bytes"] == status["total_bytes"] < status["memory_bytes"]
        assert page(f"http://{group.addresses[stage]}:9100/readyz").status_code == 200
    assert next_layer == 6


def test_heartbeats_cross_an_idle_group(group: RunningGroup) -> None:
    group.wait_until(lambda: group.engine_status()["requests_running"] == 0, "idle")
    steps = [group.stage_status(stage)["steps"] for stage in range(STAGE_COUNT)]
    for stage in range(STAGE_COUNT):
        group.wait_until(
            lambda stage=stage: group.stage_status(stage)["steps"] > steps[stage],  # type: ignore[misc]
            f"a heartbeat of stage {stage}",
        )
    status = group.engine_status()
    assert (status["requests_running"], status["requests_waiting"]) == (0, 0), "something else than heartbeats ran"


def test_every_process_says_in_each_line_whose_it_is(group: RunningGroup) -> None:
    for name in group.processes:
        lines = [json.loads(line) for line in group.log(name).splitlines()]
        assert lines, f"{name} wrote nothing"
        component, _, stage = name.partition("-")
        known = {"component": component, "namespace": "default", "model": "test", "group": 0, "incarnation": 1}
        known |= {"stage": int(stage)} if stage else {}
        for line in lines:
            assert {key: line[key] for key in known} == known, line
            assert ("stage" in line) == bool(stage), line


def test_levels_change_while_a_group_runs(group: RunningGroup) -> None:
    group.generate(PROMPT, greedy(1), "untold")
    for process in group.processes.values():
        process.send_signal(signal.SIGUSR1)
    for name in group.processes:
        group.wait_until(lambda name=name: "log level is now debug" in group.log(name), name)  # type: ignore[misc]
    group.generate(PROMPT, greedy(1), "told")
    group.wait_until(lambda: "request admitted" in group.log("engine"), "the request is told")
    for process in group.processes.values():
        process.send_signal(signal.SIGUSR2)
    for name in group.processes:
        group.wait_until(lambda name=name: "log level is now info" in group.log(name), name)  # type: ignore[misc]
    told = [line for line in map(json.loads, group.log("engine").splitlines()) if "request_id" in line]
    assert [(line["level"], line["request_id"]) for line in told] == [("debug", "told")]


def test_no_answer_is_logged_as_an_error(group: RunningGroup) -> None:
    """Runs last: nothing above may have left a warning, an error or the bus token in a log."""
    for name in group.processes:
        log = group.log(name)
        assert "Traceback" not in log, log
        assert '"level": "error"' not in log, log
        assert group.token not in log
