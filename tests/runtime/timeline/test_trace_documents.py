"""Timelines merged, summed up, written for Perfetto and drawn: pure functions of what the stages told."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.timeline_samples import step, two_stages
from stageline_api.telemetry.timeline import TimelineStep
from stageline_runtime.trace.lanes import (
    Arrow,
    ArrowKind,
    StageTimeline,
    Window,
    arrows,
    common_window,
    slices,
)
from stageline_runtime.trace.perfetto import perfetto_json
from stageline_runtime.trace.summary import summarize, summary_lines

MS = 1_000_000


@pytest.mark.parametrize("offset", [0, 10**15, -(10**9)])
def test_stages_are_put_on_the_engines_clock(offset: int) -> None:
    plain, moved = two_stages(), two_stages(offset)
    assert common_window(moved) == Window(begin=0, end=16 * MS)
    window = common_window(moved)
    for one, other in zip(plain, moved, strict=True):
        told = [(piece.state, piece.begin, piece.end) for piece in slices(other, window)]
        assert told == [(piece.state, piece.begin, piece.end) for piece in slices(one, window)]
    assert arrows(plain) == arrows(moved)


def test_arrows_join_the_send_of_a_plan_to_its_receive() -> None:
    found = [
        (arrow.kind, arrow.seq, arrow.sender, arrow.sent, arrow.receiver, arrow.received)
        for arrow in arrows(two_stages())
    ]
    # Feedback of plan 0 was taken by plan 2, the first plan of the first stage that took any: whether that one also
    # took earlier feedback can't be seen, so only what came after it is drawn.
    assert found == [
        (ArrowKind.HIDDEN, 0, 0, 4 * MS, 1, 5 * MS),
        (ArrowKind.HIDDEN, 1, 0, 8 * MS, 1, 10 * MS),
        (ArrowKind.FEEDBACK, 1, 1, 13 * MS, 0, 15 * MS),
    ]


def test_a_single_stage_has_no_arrows() -> None:
    assert arrows(two_stages()[:1]) == []


@given(st.integers(-2, 18), st.integers(-2, 18))
def test_slices_tile_any_window(first: int, second: int) -> None:
    window = Window(begin=min(first, second) * MS, end=max(first, second) * MS)
    for timeline in two_stages(12345):
        pieces = slices(timeline, window)
        for before, after in pairwise(pieces):
            assert before.end == after.begin
        told = min(window.end, 16 * MS) - max(window.begin, 0)
        assert sum(piece.end - piece.begin for piece in pieces) == max(0, told)
        assert all(piece.begin < piece.end for piece in pieces)


def test_summary_of_a_window() -> None:
    timelines = two_stages(777)
    summary = summarize(timelines, common_window(timelines))
    first, second = summary.stages
    assert first.busy == pytest.approx({"decode": 9e-3, "dummy": 1e-3})
    assert first.wait == pytest.approx({"host": 2.5e-3, "feedback": 2.5e-3})
    assert first.idle == pytest.approx(1e-3)
    assert (first.steps, second.steps) == (4, 2)
    assert second.busy == pytest.approx({"decode": 7e-3})
    assert second.wait == pytest.approx({"recv": 3e-3 + 0.4e-3 + 2.5e-3, "host": 1.1e-3})
    assert second.idle == pytest.approx(2e-3)
    assert first.bubble_ratio == pytest.approx((5 + 1) / 15)
    assert second.bubble_ratio == pytest.approx(7 / 14)
    assert summary.bubble_ratio == pytest.approx((5 + 1 + 7) / (15 + 14))
    assert summary.bottleneck.stage == 0
    assert summary.bottleneck_share == pytest.approx(10 / 15)
    assert summary.imbalance == pytest.approx(10 / 8.5)
    text = "\n".join(summary_lines(summary, common_window(timelines)))
    assert "bubble 44.8%; the busiest is stage 0" in text
    assert "imbalance 1.18" in text


def test_summary_of_an_idle_window_says_so() -> None:
    timelines = two_stages()
    window = Window(begin=0, end=MS // 2)
    summary = summarize(timelines, window)
    assert summary.bubble_ratio is None
    assert summary_lines(summary, window)[-1] == "no request was unfinished in this time"


def checked_document(timelines: list[StageTimeline], window: Window) -> list[dict[str, Any]]:
    """The events of the trace, after the checks that hold for every trace."""
    document = json.loads(perfetto_json(timelines, window, title="test"))
    assert document["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = document["traceEvents"]
    last: dict[int, float] = {}
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys(), event
        match event["ph"]:
            case "M":
                assert event["args"], event
                continue
            case "X":
                assert {"ts", "dur", "cat", "args"} <= event.keys(), event
                assert event["dur"] >= 0, event
                assert event["args"]["state"].partition(".")[0] == event["cat"]
            case "s" | "f":
                assert {"ts", "id", "cat"} <= event.keys(), event
            case other:
                raise AssertionError(f"an event of phase {other}: {event}")
        assert event["ts"] >= last.get(event["tid"], 0.0), event
        assert event["ts"] <= (window.end - window.begin) / 1e3, event
        last[event["tid"]] = event["ts"]
    check_flows(events)
    return events


def check_flows(events: list[dict[str, Any]]) -> None:
    """Each flow has one start and one end, not before it, and each lies within a slice of its track to bind to."""
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    boxes = [event for event in events if event["ph"] == "X"]
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["args"]) == (end["name"], end["args"])
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        for event in (start, end):
            assert any(
                box["tid"] == event["tid"] and box["ts"] <= event["ts"] < box["ts"] + box["dur"] for box in boxes
            ), event


@pytest.mark.parametrize("offset", [0, -(10**12)])
@pytest.mark.parametrize("window", [Window(begin=0, end=16 * MS), Window(begin=4_200_000, end=13_100_000)])
def test_perfetto_document(window: Window, offset: int) -> None:
    timelines = two_stages(offset)
    events = checked_document(timelines, window)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "stage 0", 2: "stage 1"}
    for stage, one in enumerate(summarize(timelines, window).stages):
        boxes = [event for event in events if event["ph"] == "X" and event["tid"] == stage + 1]
        busy = sum(event["dur"] for event in boxes if event["cat"] == "busy")
        assert busy / 1e6 == pytest.approx(one.busy_seconds)
        assert sum(event["dur"] for event in boxes) / 1e6 == pytest.approx(window.seconds)
    forward = next(event for event in events if event["name"] == "decode 1")
    assert forward["args"] == {
        "state": "busy.decode",
        "operation": "forward",
        "seq": 1,
        "cohort": 0,
        "rows": 2,
        "tokens": 2,
    }


def test_an_arrow_that_clock_error_turns_back_is_kept_upright() -> None:
    """With the second clock wrongly taken for 3 ms ahead, plan 0 seems to be received before it was sent."""
    first, second = two_stages()
    wrong = StageTimeline(
        stage=1,
        steps=second.steps,
        open_marks=second.open_marks,
        now_nanoseconds=second.now_nanoseconds,
        offset_nanoseconds=3 * MS,
        error_nanoseconds=3 * MS,
    )
    assert arrows([first, wrong])[0] == Arrow(
        kind=ArrowKind.HIDDEN, seq=0, sender=0, sent=4 * MS, receiver=1, received=2 * MS
    )
    window = common_window([first, wrong])
    events = checked_document([first, wrong], window)
    assert any(event["ph"] == "f" and event["ts"] == (4 * MS - window.begin) / 1e3 for event in events)


def test_window_is_empty_where_the_stages_share_no_time() -> None:
    early = StageTimeline(stage=0, steps=(step(0, [("idle", "", 0)], 10),), now_nanoseconds=10)
    late = StageTimeline(stage=1, steps=(step(0, [("idle", "", 50)], 60),), now_nanoseconds=60)
    window = common_window([early, late])
    assert window.begin == window.end
    assert checked_document([early, late], window)
    assert summary_lines(summarize([early, late], window), window)


def test_plans_that_verify_drafts_are_told_apart() -> None:
    """Each plan's compute on every stage; the table counts it as decode."""

    def ran(seq: int, drafts: int) -> TimelineStep:
        marks = [("busy.decode", "forward", 4 * seq * MS), ("wait.host", "", (4 * seq + 3) * MS)]
        return step(seq, marks, 4 * (seq + 1) * MS, drafts=drafts)

    timelines = [StageTimeline(stage=0, steps=(ran(0, 3), ran(1, 0)), now_nanoseconds=8 * MS)]
    window = common_window(timelines)
    events = json.loads(perfetto_json(timelines, window, title="t"))["traceEvents"]
    assert [one["name"] for one in events if one.get("cat") == "busy"] == ["verify 0", "decode 1"]
    waits = {one["args"]["seq"]: one["args"].get("drafts") for one in events if one.get("cat") == "wait"}
    assert waits == {0: 3, 1: None}


def test_the_draft_models_steps_are_boxes_of_their_own() -> None:
    """On the last stage, behind what was sampled."""
    marks = [("busy.decode", "forward", 0), ("busy.draft", "draft", 3 * MS), ("wait.host", "", 8 * MS)]
    timelines = [StageTimeline(stage=0, steps=(step(0, marks, 10 * MS),), now_nanoseconds=10 * MS)]
    window = common_window(timelines)
    events = json.loads(perfetto_json(timelines, window, title="t"))["traceEvents"]
    busy = [(one["name"], one["dur"]) for one in events if one.get("cat") == "busy"]
    assert busy == [("decode 0", 3000), ("draft 0", 5000)]
