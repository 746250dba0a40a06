"""The Chrome trace event format, which ui.perfetto.dev and chrome://tracing open: a track per stage, flow arrows. Pure.

Complete events (`ph: X`) for slices, flow starts and ends (`s`, `f` with `bp: e`, bound to the slice that encloses
their moment) for arrows, metadata events for names. Times are microseconds from the window's begin; the format's
numbers are doubles, so nanoseconds survive as decimals.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from stageline_api.telemetry.timeline import BUSY_PREFIX, WAIT_PREFIX
from stageline_runtime.trace.lanes import (
    Arrow,
    Slice,
    StageTimeline,
    Window,
    arrows,
    shown_state,
    slices,
)

_PROCESS: Final = 1


def perfetto_document(timelines: Sequence[StageTimeline], window: Window, *, title: str) -> dict[str, Any]:
    ordered = sorted(timelines, key=lambda one: one.stage)
    events = [_metadata("process_name", 0, {"name": title})]
    for timeline in ordered:
        track = _track(timeline.stage)
        events.append(_metadata("thread_name", track, {"name": f"stage {timeline.stage}"}))
        events.append(_metadata("thread_sort_index", track, {"sort_index": timeline.stage}))
    timed = [_slice_event(piece, window) for timeline in ordered for piece in slices(timeline, window)]
    inside = [arrow for arrow in arrows(ordered) if _is_inside(arrow, window)]
    for number, arrow in enumerate(inside):
        timed += _flow_events(number, arrow, window)
    events += sorted(timed, key=lambda event: (event["tid"], event["ts"]))
    errors = {f"stage {one.stage}": one.error_nanoseconds for one in ordered}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"begin_nanoseconds": window.begin, "clock_error_nanoseconds": errors},
    }


def perfetto_json(timelines: Sequence[StageTimeline], window: Window, *, title: str) -> str:
    return json.dumps(perfetto_document(timelines, window, title=title), separators=(",", ":"))


def _slice_event(piece: Slice, window: Window) -> dict[str, Any]:
    category, _, detail = piece.state.partition(".")
    label = piece.operation if piece.state == f"{WAIT_PREFIX}host" and piece.operation else detail or category
    arguments: dict[str, Any] = {"state": piece.state}
    if piece.operation:
        arguments["operation"] = piece.operation
    if piece.step is not None:
        step = piece.step
        arguments |= {"seq": step.seq, "cohort": step.cohort, "rows": step.rows, "tokens": step.tokens}
        arguments |= {"drafts": step.drafts} if step.drafts else {}
    return {
        "ph": "X",
        "name": f"{shown_state(piece).removeprefix(BUSY_PREFIX)} {piece.step.seq}"
        if piece.step is not None and piece.state.startswith(BUSY_PREFIX)
        else label,
        "cat": category,
        "pid": _PROCESS,
        "tid": _track(piece.stage),
        "ts": _microseconds(piece.begin - window.begin),
        "dur": _microseconds(piece.end - piece.begin),
        "args": arguments,
    }


def _flow_events(number: int, arrow: Arrow, window: Window) -> list[dict[str, Any]]:
    common = {"name": arrow.kind.value, "cat": arrow.kind.value, "id": number, "pid": _PROCESS}
    start = common | {"ph": "s", "tid": _track(arrow.sender), "ts": _microseconds(arrow.sent - window.begin)}
    # An arrow that ends before it starts (clocks compared too coarsely) would be dropped by the viewer.
    received = max(arrow.received, arrow.sent)
    end = common | {"ph": "f", "bp": "e", "tid": _track(arrow.receiver), "ts": _microseconds(received - window.begin)}
    return [start | {"args": {"seq": arrow.seq}}, end | {"args": {"seq": arrow.seq}}]


def _is_inside(arrow: Arrow, window: Window) -> bool:
    return window.begin <= arrow.sent and max(arrow.sent, arrow.received) < window.end


def _metadata(name: str, track: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": track, "args": arguments}


def _track(stage: int) -> int:
    """Track 0 is the process's own."""
    return stage + 1


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1e3
