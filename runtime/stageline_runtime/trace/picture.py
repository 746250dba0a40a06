"""Timelines as an SVG: a lane per stage, a box per state, hidden tensors and feedback as lines. Pure text, no library.

Boxes narrower than a pixel are merged into one of the state that fills most of it, so that the file stays small
whatever the window; lines and numbers are left out where they would only be a blur.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Final

from stageline_api.telemetry.timeline import BUSY_PREFIX, IDLE_STATE, TimelineStep
from stageline_runtime.trace.lanes import (
    Arrow,
    ArrowKind,
    Slice,
    StageTimeline,
    Window,
    arrows,
    dead_plans,
    shown_state,
    slices,
)

WIDTH: Final = 1200
MARGIN_LEFT: Final = 70
MARGIN_RIGHT: Final = 20
TOP: Final = 44
LANE_HEIGHT: Final = 40
LANE_GAP: Final = 26
BOTTOM: Final = 60
NUMBER_WIDTH: Final = 26.0
"""Narrowest box that is given its plan's number."""
MOST_ARROWS: Final = 400

COLORS: Final = {
    "busy.prefill": "#3b6fb6",
    "busy.decode": "#3a9d6e",
    "busy.mixed": "#7a5bb0",
    "busy.verify": "#2aa5a0",
    "busy.draft": "#86b84f",
    "busy.dead": "#c3a6a0",
    "busy.dummy": "#8a8f98",
    "wait.recv": "#f4d58d",
    "wait.send": "#f0b072",
    "wait.feedback": "#f2a6a6",
    "wait.host": "#d9534f",
    "wait.starved": "#e8e3d3",
    IDLE_STATE: "#f6f7f9",
}
UNKNOWN_COLOR: Final = "#000000"
ARROW_COLORS: Final = {ArrowKind.HIDDEN: "#55606e", ArrowKind.FEEDBACK: "#b0413e"}


def draw_timeline(timelines: Sequence[StageTimeline], window: Window, *, title: str) -> str:
    ordered = sorted(timelines, key=lambda one: one.stage)
    height = TOP + len(ordered) * (LANE_HEIGHT + LANE_GAP) + BOTTOM
    dead = dead_plans(ordered)
    per_lane = [
        merged([replace(piece, state=shown_state(piece, dead)) for piece in slices(one, window)], window)
        for one in ordered
    ]
    body = [_text(MARGIN_LEFT, 22, title, size=15)]
    for lane, (timeline, pieces) in enumerate(zip(ordered, per_lane, strict=True)):
        body.append(_text(10, _lane_top(lane) + LANE_HEIGHT / 2 + 4, f"stage {timeline.stage}"))
        for piece in pieces:
            body += _box(piece, lane, window)
    lanes = {timeline.stage: lane for lane, timeline in enumerate(ordered)}
    body += _arrow_lines(arrows(ordered), lanes, window)
    axis = _lane_top(len(ordered) - 1) + LANE_HEIGHT + 8
    body += _axis(axis, window)
    body += _legend(axis + 36, sorted({piece.state for pieces in per_lane for piece in pieces}))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *body, "</svg>", ""])


def busiest_window(timelines: Sequence[StageTimeline], window: Window, *, plans: int) -> Window:
    """The shortest part of `window` that holds `plans` plans in a row on the first stage, edges included.

    The whole window where there are fewer.
    """
    first = min(timelines, key=lambda one: one.stage)
    ends = [step.end_nanoseconds - first.offset_nanoseconds for step in first.steps if step.kind]
    inside = [end for end in ends if window.begin <= end <= window.end]
    if len(inside) <= plans:
        return window
    begin, end = min(zip(inside, inside[plans:], strict=False), key=lambda pair: pair[1] - pair[0])
    return Window(begin=begin, end=end)


def merged(pieces: Sequence[Slice], window: Window) -> list[Slice]:
    """Slices at least a pixel wide as they are; runs of narrower ones as boxes of the state that fills most of each."""
    pixel = max(1, (window.end - window.begin) // (WIDTH - MARGIN_LEFT - MARGIN_RIGHT))
    result: list[Slice] = []
    run: list[Slice] = []
    for piece in pieces:
        if piece.end - piece.begin >= pixel:
            result += _most_of(run)
            run = []
            result.append(piece)
            continue
        run.append(piece)
        if piece.end - run[0].begin >= pixel:
            result += _most_of(run)
            run = []
    return result + _most_of(run)


def _most_of(run: Sequence[Slice]) -> list[Slice]:
    if not run:
        return []
    filled: dict[str, int] = {}
    for piece in run:
        filled[piece.state] = filled.get(piece.state, 0) + piece.end - piece.begin
    state = max(filled, key=lambda name: filled[name])
    begin, end = run[0].begin, run[-1].end
    return [Slice(stage=run[0].stage, state=state, operation="", begin=begin, end=end, step=None)]


def _box(piece: Slice, lane: int, window: Window) -> Iterator[str]:
    left, right = _x(piece.begin, window), _x(piece.end, window)
    is_busy = piece.state.startswith(BUSY_PREFIX)
    # Compute fills the lane, waiting only its middle: work is seen at a glance, also without colours.
    top, height = (_lane_top(lane), LANE_HEIGHT) if is_busy else (_lane_top(lane) + 12, LANE_HEIGHT - 24)
    color = COLORS.get(piece.state, UNKNOWN_COLOR)
    label = escape(_tooltip(piece))
    yield (
        f'<rect x="{left:.2f}" y="{top}" width="{right - left:.2f}" height="{height}" fill="{color}">'
        f"<title>{label}</title></rect>"
    )
    if is_busy and piece.step is not None and right - left >= NUMBER_WIDTH:
        middle = (left + right) / 2
        yield _text(middle, top + height / 2 + 4, str(piece.step.seq), anchor="middle", fill="#ffffff", size=11)


def _tooltip(piece: Slice) -> str:
    milliseconds = (piece.end - piece.begin) / 1e6
    what = f"{piece.state} {piece.operation}".strip()
    return f"{what}: {milliseconds:.3f} ms{_plan_of(piece.step) if piece.step else ''}"


def _plan_of(step: TimelineStep) -> str:
    drafts = f", {step.drafts} of them drafts" if step.drafts else ""
    return f", plan {step.seq}, {step.rows} rows, {step.tokens} tokens{drafts}{', dead' if step.dead else ''}"


def _arrow_lines(found: Sequence[Arrow], lanes: dict[int, int], window: Window) -> Iterator[str]:
    inside = [one for one in found if window.begin <= one.sent and one.received <= window.end]
    if len(inside) > MOST_ARROWS:
        return
    for arrow in inside:
        downward = lanes[arrow.sender] < lanes[arrow.receiver]
        start = _lane_top(lanes[arrow.sender]) + (LANE_HEIGHT if downward else 0)
        end = _lane_top(lanes[arrow.receiver]) + (0 if downward else LANE_HEIGHT)
        dashes = ' stroke-dasharray="4 3"' if arrow.kind is ArrowKind.FEEDBACK else ""
        yield (
            f'<line x1="{_x(arrow.sent, window):.2f}" y1="{start}" x2="{_x(arrow.received, window):.2f}" y2="{end}" '
            f'stroke="{ARROW_COLORS[arrow.kind]}" stroke-width="1.2"{dashes}/>'
        )


def _axis(top: float, window: Window) -> Iterator[str]:
    yield f'<line x1="{MARGIN_LEFT}" y1="{top}" x2="{WIDTH - MARGIN_RIGHT}" y2="{top}" stroke="#888888"/>'
    milliseconds = (window.end - window.begin) / 1e6
    tick = _tick(milliseconds)
    for number in range(int(milliseconds / tick) + 1):
        x = _x(window.begin + int(number * tick * 1e6), window)
        yield f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 4}" stroke="#888888"/>'
        yield _text(x, top + 17, f"{number * tick:g} ms", anchor="middle", size=11)


def _tick(milliseconds: float) -> float:
    """A round distance that gives 4 to 12 ticks."""
    tick = 1e-3
    for factor in (2, 2.5, 2) * 9:
        if milliseconds / tick <= 12:
            return tick
        tick *= factor
    return tick


def _legend(top: float, states: Iterable[str]) -> Iterator[str]:
    x = float(MARGIN_LEFT)
    for state in states:
        yield f'<rect x="{x}" y="{top - 10}" width="12" height="12" fill="{COLORS.get(state, UNKNOWN_COLOR)}"/>'
        label = state.replace(".", " ")
        yield _text(x + 17, top, label, size=12)
        x += 34 + 7.0 * len(label)


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#222222", size: int = 13) -> str:
    return f'<text x="{x:.2f}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>'


def _x(nanoseconds: int, window: Window) -> float:
    length = max(1, window.end - window.begin)
    return MARGIN_LEFT + (nanoseconds - window.begin) / length * (WIDTH - MARGIN_LEFT - MARGIN_RIGHT)


def _lane_top(lane: int) -> int:
    return TOP + lane * (LANE_HEIGHT + LANE_GAP)
