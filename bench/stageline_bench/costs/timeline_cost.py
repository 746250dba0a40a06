"""Cost of timeline and step metrics per plan in the runner's thread: `python -m stageline_bench.costs.timeline_cost`.

Runs the state changes of a decode step with and without the timeline's listener and the counting at the step's end, and
one response of the endpoint. Prints nanoseconds of the thread's CPU time (independent of load), the medians of
interleaved repetitions.
"""

import time
from collections.abc import Callable
from statistics import median

from stageline_runtime.plan_bus.messages import PlanRow, StepPlan
from stageline_runtime.stage.telemetry.metrics import StageMetrics
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.stage.telemetry.state_clock import BusyKind, StateClock, Timeline, WaitReason

STEPS = 5000
REPETITIONS = 15
ROWS = 8


def _plan(seq: int) -> StepPlan:
    rows = tuple(PlanRow(slot, 1, 30, 1, (), True) for slot in range(ROWS))
    return StepPlan(seq, 0, (), rows, ROWS, seq - 2, True, False)


def _steps(clock: StateClock, plans: list[StepPlan], end: Callable[[StepPlan], object]) -> float:
    begin = time.thread_time_ns()
    for plan in plans:
        clock.enter(WaitReason.HOST)
        clock.enter(WaitReason.RECV, "receive hidden")
        clock.enter(BusyKind.DECODE, "forward")
        clock.enter(WaitReason.HOST, "send feedback")
        clock.enter(WaitReason.HOST)
        end(plan)
    return (time.thread_time_ns() - begin) / STEPS


def _answer(action: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    action()
    return float(time.thread_time_ns() - begin)


def main() -> None:
    """Measure and print."""
    timeline, bare = Timeline(), StateClock()
    clock = StateClock(listener=timeline.mark)
    progress = StageProgress(stage=1, stage_count=2, incarnation=1, clock=clock, timeline=timeline)
    metrics = StageMetrics(progress, "model")
    with_it, without, pages, scrapes, pongs = [], [], [], [], []
    for repetition in range(REPETITIONS):
        plans = [_plan(repetition * STEPS + index) for index in range(STEPS)]
        without.append(_steps(bare, plans, lambda _plan: None))
        with_it.append(_steps(clock, plans, lambda plan: progress.count_step(plan, BusyKind.DECODE)))
        pages.append(_answer(lambda: progress.timeline_page(-1).model_dump_json()))
        scrapes.append(_answer(metrics.page))
        pongs.append(_answer(timeline.recent_moments))
    print(f"state changes of a step, no listener:     {median(without):10.0f} ns")  # noqa: T201
    print(f"added by timeline and step metrics:       {median(with_it) - median(without):10.0f} ns")  # noqa: T201
    print(f"one page of the timeline (other thread):  {median(pages):10.0f} ns")  # noqa: T201
    print(f"one scrape (other thread):                {median(scrapes):10.0f} ns")  # noqa: T201
    print(f"moments for one ping:                     {median(pongs):10.0f} ns")  # noqa: T201


if __name__ == "__main__":
    main()
