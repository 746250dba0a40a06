"""Traces of real groups: every plan on every stage, causes before effects, sums equal to the counters."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from oracles.pipeline_checks import wait_all_counted
from processes.running_group import RunningGroup, page, running_group
from stageline_api import ports
from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_api.engine_http import SamplingParams
from stageline_api.telemetry.timeline import GroupClocks, TimelineStep
from stageline_local.session.endpoints_file import write_endpoints
from stageline_local.session.instance import Instance
from stageline_runtime.trace.collect import collect
from stageline_runtime.trace.lanes import ArrowKind, StageTimeline, arrows, common_window
from stageline_runtime.trace.summary import summarize

REQUESTS, TOKENS = 5, 12


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.thorough)], ids=["two stages", "three stages"]
)
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path
) -> Iterator[RunningGroup]:
    """A group that has answered some requests and is idle again."""
    directory = tmp_path_factory.mktemp("group")
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 16}
    with running_group(directory, tiny_llama, request.param, **settings) as running:
        ask(running, REQUESTS)
        wait_all_counted(running)
        running.wait_until(lambda: len(clocks(running).stages) == len(running.addresses), "a comparison of all clocks")
        yield running


def ask(group: RunningGroup, requests: int) -> None:
    # Each begins otherwise, so that no prompt's beginning is in the cache already.
    prompts = [(20 + index, *range(4, 10 + 8 * index)) for index in range(requests)]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    group.generate_all(prompts, [sampling] * requests)


def clocks(group: RunningGroup) -> GroupClocks:
    return GroupClocks.model_validate_json(page(f"{group.url}/clock").content)


def traced(group: RunningGroup) -> list[StageTimeline]:
    """All that the stages hold, cut to the plans that every stage has finished."""
    with httpx.Client(trust_env=False) as http:
        _, timelines, _ = collect(http, group.url, 0)
    return timelines


def common_steps(timelines: list[StageTimeline]) -> list[tuple[TimelineStep, ...]]:
    """Each stage's steps up to the newest plan that all have finished (a heartbeat may be under way)."""
    newest = min(one.steps[-1].seq for one in timelines)
    return [tuple(step for step in one.steps if step.seq <= newest) for one in timelines]


def counters(group: RunningGroup, stage: int) -> dict[tuple[str, str], float]:
    """(series, kind or reason or tensor) of one stage's metrics."""
    text = page(f"http://{group.addresses[stage]}:{ports.STAGE_HEALTH}/metrics").text
    return samples(text)


def samples(text: str) -> dict[tuple[str, str], float]:
    return {
        (
            sample.name,
            next((sample.labels[key] for key in ("kind", "reason", "tensor", "stage") if key in sample.labels), ""),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_every_plan_is_on_every_stage_in_order(group: RunningGroup) -> None:
    steps = common_steps(traced(group))
    first = [(step.seq, step.cohort, step.kind, step.rows, step.tokens) for step in steps[0]]
    assert [one[0] for one in first] == list(range(len(first)))
    for others in steps[1:]:
        assert [(step.seq, step.cohort, step.kind, step.rows, step.tokens) for step in others] == first
    prompt_tokens = sum(7 + 8 * index for index in range(REQUESTS))
    # The last token of a request is sampled and not run.
    assert sum(step.tokens for step in steps[0]) == prompt_tokens + REQUESTS * (TOKENS - 1)
    assert {step.kind for step in steps[0]} >= {"dummy", "prefill", "decode"}
    for mine in steps:
        for before, after in pairwise(mine):
            assert after.begin_nanoseconds == before.end_nanoseconds


def test_nothing_is_received_before_it_was_sent(group: RunningGroup) -> None:
    timelines = traced(group)
    found = arrows(timelines)
    early = [arrow for arrow in found if arrow.received < arrow.sent]
    assert not early, early
    count, hops = len(common_steps(timelines)[0]), len(timelines) - 1
    hidden = {(arrow.seq, arrow.sender, arrow.receiver) for arrow in found if arrow.kind is ArrowKind.HIDDEN}
    assert hidden >= {(seq, hop, hop + 1) for seq in range(count) for hop in range(hops)}
    feedback = [arrow for arrow in found if arrow.kind is ArrowKind.FEEDBACK]
    assert {(arrow.sender, arrow.receiver) for arrow in feedback} == {(hops, 0)}
    assert len({arrow.seq for arrow in feedback}) == len(feedback) > TOKENS


def test_sums_equal_the_state_counters(group: RunningGroup) -> None:
    before = [counters(group, stage) for stage in range(len(group.addresses))]
    timelines = traced(group)
    after = [counters(group, stage) for stage in range(len(group.addresses))]
    for timeline, early, late in zip(timelines, before, after, strict=True):
        (told,) = summarize([timeline], common_window([timeline])).stages
        spent = (
            {("stageline_stage_busy_seconds_total", kind): seconds for kind, seconds in told.busy.items()}
            | {("stageline_stage_wait_seconds_total", reason): seconds for reason, seconds in told.wait.items()}
            | {("stageline_stage_idle_seconds_total", str(timeline.stage)): told.idle}
        )
        for series, seconds in spent.items():
            assert early[series] * 0.99 <= seconds <= late[series] * 1.01, (series, early[series], late[series])
        wall = ("stageline_stage_wall_seconds_total", str(timeline.stage))
        assert early[wall] * 0.99 <= told.active_seconds + told.idle <= late[wall] * 1.01


def test_clocks_of_one_machine_are_found_equal(group: RunningGroup) -> None:
    for clock in clocks(group).stages:
        assert abs(clock.offset_nanoseconds) <= clock.error_nanoseconds, clock
        assert clock.error_nanoseconds >= clock.round_trip_nanoseconds // 2 > 0, clock


def test_step_metrics_agree_with_the_timeline(group: RunningGroup) -> None:
    timelines = traced(group)
    for stage, timeline in enumerate(timelines):
        found = counters(group, stage)
        for kind in ("prefill", "decode", "mixed", "dummy"):
            steps = [step for step in timeline.steps if step.kind == kind]
            assert found["stageline_stage_step_seconds_count", kind] == len(steps)
            assert found["stageline_stage_step_seconds_sum", kind] == pytest.approx(
                found["stageline_stage_busy_seconds_total", kind], rel=0.01
            )
        hidden, feedback = (found["stageline_p2p_bytes_total", tensor] for tensor in ("hidden", "feedback"))
        is_last = stage == len(timelines) - 1
        assert (hidden == 0, feedback > 0) == (is_last, is_last)


def test_the_bubble_of_the_last_seconds_lies_between_nothing_and_all(group: RunningGroup) -> None:
    def measured() -> bool:
        ask(group, 1)
        told = [counters(group, stage).get(("stageline_stage_bubble_ratio", str(stage))) for stage in stages]
        ratios = [ratio for ratio in told if ratio is not None]
        assert all(0 < ratio <= 1 for ratio in ratios), told
        return len(ratios) == len(told) and all(ratio < 1 for ratio in ratios)

    stages = range(len(group.addresses))
    # It is of some seconds only: without a request in them all of it is bubble, or there is nothing to tell.
    group.wait_until(measured, "work of every stage within the window")


def test_engine_measures_the_links(group: RunningGroup) -> None:
    transfers = [("stageline_p2p_latency_seconds_count", str(stage)) for stage in range(1, len(group.addresses))]
    expected = [*transfers, ("stageline_feedback_latency_seconds_count", "")]

    def measured() -> bool:
        # A transfer counts only where its receiver waited already, so that one burst of plans may leave none.
        ask(group, 1)
        found = samples(page(f"{group.url}/metrics").text)
        return all(found.get(series, 0) > 0 for series in expected)

    group.wait_until(measured, f"all of {expected}")


def test_timeline_is_read_page_by_page(group: RunningGroup) -> None:
    url = f"http://{group.addresses[0]}:{ports.STAGE_HEALTH}/timeline"
    everything = page(url).json()["steps"]
    rest = page(f"{url}?since_seq={everything[4]['seq']}").json()["steps"]
    assert rest[0]["seq"] == everything[5]["seq"]
    refused = page(f"{url}?since_seq=new")
    assert refused.status_code == 400
    assert "since_seq='new'" in refused.text


def run_trace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stageline_cli.main", "trace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


def test_command_writes_a_trace_of_the_model_that_is_up(group: RunningGroup, tmp_path: Path) -> None:
    instance = Instance.claim(tmp_path / "small", "small", "http://127.0.0.1:1")
    endpoint = GroupEndpoint(model="tiny", group=0, incarnation=1, url=group.url, ready=True)
    write_endpoints(tmp_path / "small" / "endpoints.json", Endpoints(groups=(endpoint,)))
    output = tmp_path / "trace.json"
    paths = ("--output", str(output), "--state-dir", str(tmp_path))
    try:
        done = run_trace("small", "--seconds", "0", *paths)
    finally:
        instance.release()
    assert done.returncode == 0, done.stderr
    assert "the busiest is stage" in done.stdout
    events: list[dict[str, Any]] = json.loads(output.read_text())["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in boxes} == {stage + 1 for stage in range(len(group.addresses))}
    assert {event["args"]["state"] for event in boxes} >= {"busy.decode", "wait.recv", "wait.feedback", "idle"}
    assert {event["name"] for event in events if event["ph"] == "s"} == {"hidden", "feedback"}


def test_watching_covers_the_time_watched(group: RunningGroup, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    done = run_trace("--engine-url", group.url, "--seconds", "0.4", "--output", str(output))
    assert done.returncode == 0, done.stderr
    boxes = [event for event in json.loads(output.read_text())["traceEvents"] if event["ph"] == "X"]
    for stage in range(len(group.addresses)):
        watched = sum(event["dur"] for event in boxes if event["tid"] == stage + 1) / 1e6
        assert 0.3 < watched < 60, watched


@pytest.mark.parametrize(
    ("arguments", "words", "exit_code"),
    [
        pytest.param(("--engine-url", "http://127.0.0.1:9"), "the engine does not answer", 1, id="no engine"),
        pytest.param(("absent",), "absent is not up", 2, id="not up"),
        pytest.param((), "nothing is up", 2, id="nothing is up"),
    ],
)
def test_command_says_what_is_wrong(tmp_path: Path, arguments: tuple[str, ...], words: str, exit_code: int) -> None:
    done = run_trace(*arguments, "--state-dir", str(tmp_path), "--output", str(tmp_path / "trace.json"))
    assert done.returncode == exit_code, done
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "trace.json").exists()


def test_command_names_the_stage_that_is_missing(tmp_path: Path, tiny_llama: Path) -> None:
    with running_group(tmp_path, tiny_llama, 2, start=False, held_back=frozenset({"stage-1"})) as group:
        group.wait_until(lambda: stages_connected(group) == 1, "stage 0's hello")
        done = run_trace("--engine-url", group.url, "--output", str(tmp_path / "trace.json"))
    assert done.returncode == 1
    assert "stage 1 of tiny is not connected" in done.stderr


def stages_connected(group: RunningGroup) -> int:
    return int(group.engine_status().get("stages_connected", 0))
