"""The stage's ring: steps tile the stage's time as its clock counts it, whatever is read when."""

import threading
from collections.abc import Callable
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from oracles.timeline_samples import plan
from stageline_api.health import Phase
from stageline_api.telemetry.timeline import TimelineStep
from stageline_runtime.stage.telemetry.progress import BucketCounts, StageProgress
from stageline_runtime.stage.telemetry.state_clock import (
    IDLE,
    MAX_MARKS,
    PAGE_STEPS,
    BusyKind,
    State,
    StateClock,
    StepRecord,
    Timeline,
    WaitReason,
    state_name,
)
from stageline_runtime.trace.lanes import StageTimeline, common_window
from stageline_runtime.trace.summary import StageSummary, summarize

STATES: list[State] = [*BusyKind, *WaitReason, IDLE]


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


def make(ring_steps: int = 4096) -> tuple[Hand, StateClock, Timeline]:
    hand, timeline = Hand(), Timeline(ring_steps)
    return hand, StateClock(hand, timeline.mark), timeline


def run_step(hand: Hand, clock: StateClock, timeline: Timeline, seq: int, busy: int = 5) -> StepRecord:
    for state, operation, lasting in (
        (WaitReason.RECV, "receive hidden", 2),
        (BusyKind.DECODE, "forward", busy),
        (WaitReason.HOST, "send hidden", 1),
        (WaitReason.HOST, "", 0),
    ):
        clock.enter(state, operation)
        hand.now += lasting
    return timeline.end_step(plan(seq), BusyKind.DECODE)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(STATES), st.sampled_from(["", "a", "b"]), st.integers(0, 50)), st.just("end")
        ),
        max_size=60,
    )
)
def test_states_of_the_timeline_sum_to_the_clocks_counters(history: list[tuple[State, str, int] | str]) -> None:
    hand, clock, timeline = make()
    seq = 0
    for event in history:
        if isinstance(event, str):
            timeline.end_step(plan(seq), BusyKind.DECODE)
            seq += 1
        else:
            state, operation, lasting = event
            clock.enter(state, operation)
            hand.now += lasting
    spent, wall = clock.reading()
    told = summary_of(timeline, hand.now)
    counted = {state_name(state): seconds for state, seconds in spent.items()}
    assert told.busy == pytest.approx(
        {kind.value: counted.get(f"busy.{kind}", 0) for kind in BusyKind if kind in told.busy}
    )
    assert told.wait_seconds == pytest.approx(sum(counted.get(f"wait.{reason}", 0) for reason in WaitReason))
    assert told.idle == pytest.approx(counted.get("idle", 0))
    assert told.active_seconds + told.idle == pytest.approx(wall)
    since_start = timeline.seconds_since(0, hand.now)
    assert {s: v for s, v in since_start.items() if v} == pytest.approx({s: v for s, v in spent.items() if v})


def summary_of(timeline: Timeline, now: int) -> StageSummary:
    steps: list[TimelineStep] = []
    since = -1
    while True:
        page = timeline.page(since, stage=0, stage_count=1, incarnation=1, now=now)
        steps += page.steps
        if not page.more:
            break
        since = steps[-1].seq
    told = [StageTimeline(stage=0, steps=tuple(steps), open_marks=page.open_marks, now_nanoseconds=now)]
    return summarize(told, common_window(told)).stages[0]


def test_a_step_begins_where_the_one_before_ended() -> None:
    hand, clock, timeline = make()
    records = [run_step(hand, clock, timeline, seq) for seq in range(3)]
    for before, after in pairwise(records):
        assert after.marks[0][2] == before.end_nanoseconds
    assert [record.busy_nanoseconds() for record in records] == [5, 5, 5]


def test_busy_time_that_lasts_to_the_end_of_a_step_is_counted() -> None:
    hand, clock, timeline = make()
    clock.enter(BusyKind.PREFILL, "forward")
    hand.now += 7
    clock.enter(WaitReason.HOST)
    assert timeline.end_step(plan(0), BusyKind.PREFILL).busy_nanoseconds() == 7


def test_ring_keeps_the_newest_steps_and_says_how_far_back_it_reaches() -> None:
    hand, clock, timeline = make(ring_steps=10)
    for seq in range(25):
        run_step(hand, clock, timeline, seq)
    page = timeline.page(-1, stage=1, stage_count=2, incarnation=3, now=hand.now)
    assert [one.seq for one in page.steps] == list(range(15, 25))
    assert (page.oldest_seq, page.more, page.stage, page.stage_count, page.incarnation) == (15, False, 1, 2, 3)


def test_pages_are_bounded_and_give_every_step_once() -> None:
    hand, clock, timeline = make()
    count = 2 * PAGE_STEPS + 3
    for seq in range(count):
        run_step(hand, clock, timeline, seq)
    seen, since, more = [], -1, True
    while more:
        page = timeline.page(since, stage=0, stage_count=1, incarnation=1, now=hand.now)
        assert len(page.steps) <= PAGE_STEPS
        seen += [one.seq for one in page.steps]
        since, more = seen[-1], page.more
    assert seen == list(range(count))


def test_an_empty_timeline_has_a_page() -> None:
    hand, _clock, timeline = make()
    page = timeline.page(-1, stage=0, stage_count=1, incarnation=1, now=hand.now)
    assert (page.steps, page.oldest_seq, page.more) == ((), None, False)
    assert [mark.state for mark in page.open_marks] == ["idle"]


def test_repeated_states_add_no_marks_and_planless_changes_are_bounded() -> None:
    hand, clock, timeline = make()
    for _ in range(1000):
        clock.enter(IDLE)
    assert len(timeline.page(-1, stage=0, stage_count=1, incarnation=1, now=hand.now).open_marks) == 1
    for _ in range(1000):
        clock.enter(WaitReason.STARVED)
        hand.now += 1
        clock.enter(IDLE)
        hand.now += 1
    marks = timeline.page(-1, stage=0, stage_count=1, incarnation=1, now=hand.now).open_marks
    assert len(marks) == MAX_MARKS
    assert marks[-1].state == "idle"
    assert marks[-1].at_nanoseconds == hand.now - 1


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        pytest.param(1_000_000, 3 / 8, id="all: 2 waiting and 1 host of 8 a step"),
        pytest.param(4, 1 / 4, id="the last four: three busy, one host"),
        pytest.param(0, None, id="nothing"),
    ],
)
def test_bubble_of_a_window(window: int, expected: float | None) -> None:
    hand, clock, timeline = make()
    for seq in range(20):
        run_step(hand, clock, timeline, seq)
    bubble = timeline.bubble_ratio(hand.now - window, hand.now)
    assert bubble == (None if expected is None else pytest.approx(expected))


def test_dummy_steps_are_bubble_and_idle_time_is_not() -> None:
    hand, clock, timeline = make()
    for state, lasting in ((IDLE, 1000), (BusyKind.DUMMY, 3), (BusyKind.DECODE, 6), (WaitReason.HOST, 1)):
        clock.enter(state)
        hand.now += lasting
    assert timeline.bubble_ratio(0, hand.now) == pytest.approx(4 / 10)
    clock.enter(IDLE)
    hand.now += 5
    assert timeline.bubble_ratio(hand.now - 5, hand.now) is None


def test_readers_see_whole_steps_while_steps_are_written() -> None:
    """A reader in another thread never sees a hole, a torn step or an order that isn't the plans'."""
    hand, clock, timeline = make(ring_steps=64)
    problems: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            page = timeline.page(-1, stage=0, stage_count=1, incarnation=1, now=0)
            seqs = [one.seq for one in page.steps]
            if seqs != sorted(set(seqs)):
                problems.append(f"order {seqs}")
            problems.extend(f"torn {one}" for one in page.steps if len(one.marks) < 3)

    reader = threading.Thread(target=read)
    reader.start()
    for seq in range(5000):
        run_step(hand, clock, timeline, seq)
    done.set()
    reader.join()
    assert not problems, problems[:3]


@given(st.lists(st.floats(0, 20, allow_nan=False), max_size=50))
def test_bucket_counts_are_those_of_the_values(values: list[float]) -> None:
    bounds = (0.5, 1.0, 10.0)
    counts = BucketCounts(bounds)
    for value in values:
        counts.observe(value)
    buckets, value_sum = counts.cumulative()
    assert buckets == [(str(bound), sum(value <= bound for value in values)) for bound in bounds] + [
        ("+Inf", len(values))
    ]
    assert value_sum == pytest.approx(sum(values))


def progress_of(stage: int, timeline: Timeline, now: Callable[[], int]) -> StageProgress:
    return StageProgress(
        stage=stage,
        stage_count=2,
        incarnation=1,
        clock=StateClock(now, timeline.mark),
        timeline=timeline,
        hidden_token_bytes=128,
        feedback_row_bytes=24,
    )


def test_bytes_sent_follow_from_the_plans() -> None:
    """The first stage sends hidden tensors, heartbeats included; the last one sends the feedback that is posted."""
    first, last = (progress_of(stage, Timeline(), Hand()) for stage in (0, 1))
    for progress in (first, last):
        progress.count_step(plan(0, rows=3, feedback_posted=True), BusyKind.DECODE)
        progress.count_step(plan(1, rows=2, feedback_posted=False), BusyKind.DECODE)
        progress.count_step(plan(2, rows=0), BusyKind.DECODE)
    assert (first.hidden_bytes_sent, first.feedback_bytes_sent) == ((3 + 2 + 1) * 128, 0)
    assert (last.hidden_bytes_sent, last.feedback_bytes_sent) == (0, 3 * 24)
    assert last.steps_by_kind[BusyKind.DECODE] == 2
    assert [one.kind for one in last.timeline_page(-1).steps] == ["decode", "decode", ""]


def test_draft_steps_count_where_they_were_run() -> None:
    """A rank of the last stage without a row to draft for runs none, though the plan names some."""
    drafting, beside = (progress_of(1, Timeline(), Hand()) for _ in range(2))
    for seq, progress in product(range(2), (drafting, beside)):
        for state in (BusyKind.DECODE, *((BusyKind.DRAFT,) if progress is drafting else ()), WaitReason.HOST):
            progress.clock.enter(state)
        progress.count_step(replace(plan(seq), draft_steps=3), BusyKind.DECODE, drafted=progress is drafting)
    counted = [progress.steps_by_kind[BusyKind.DRAFT] for progress in (drafting, beside)]
    assert counted == [6, 0]
    timed = [progress.step_seconds_by_kind[BusyKind.DRAFT].cumulative()[0][-1] for progress in (drafting, beside)]
    assert timed == [("+Inf", 2), ("+Inf", 0)]


def test_each_phase_of_a_start_is_timed_and_what_comes_after_it_is_not() -> None:
    """Messages that change within a phase, and a phase that comes twice, add up; being ready isn't part of a start."""
    moments = iter([0, *(seconds * 10**9 for seconds in (1, 4, 10, 12, 20, 99))])
    progress = progress_of(0, Timeline(), Hand())
    progress.clock = StateClock(lambda: next(moments))
    progress.entered_nanoseconds = 0
    for phase in (Phase.LOADING, Phase.LOADING, Phase.RENDEZVOUS, Phase.LOADING, Phase.WARMING, Phase.READY):
        progress.enter(phase, "more")
    progress.enter(Phase.DRAINING)
    assert progress.startup_seconds == {
        Phase.STARTING: 1.0,
        Phase.LOADING: (4 - 1) + (12 - 10),
        Phase.RENDEZVOUS: 10 - 4,
        Phase.WARMING: 20 - 12,
    }
