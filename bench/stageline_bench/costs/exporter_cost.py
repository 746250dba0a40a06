"""Cost of the exporters for the serving threads, and of a scrape: `make bench-exporters`.

Each loop only counts what one plan of 8 rows, or one message to a client, makes its process count. Prints nanoseconds
of the thread's CPU time (independent of load), the medians of repetitions, and the share of a decode step; fails if
that is 1 % or more.
"""

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason
from stageline_api.resource import pipeline_model
from stageline_gateway.telemetry.metrics import GatewayMetrics, RequestMeter
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.plan_bus.messages import PlanRow, StepPlan
from stageline_runtime.stage.telemetry.metrics import StageMetrics
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.stage.telemetry.state_clock import BusyKind, StateClock, Timeline, WaitReason

STEPS, REPETITIONS, ROWS = 5000, 15, 8
MODELS = 500
SCRAPE_INTERVAL_SECONDS = 15
STEP_SECONDS = 0.008
"""A decode of 8 rows on one of two stages of SmolLM2-135M, one core each (docs/dev/benchmarks.md)."""
ALLOWED_SHARE = 0.01
"""Maximum share of a step, for each process."""

Step = Callable[[StepPlan], object]


def stage() -> tuple[Step, Callable[[], object]]:
    """The runner's thread: clock, timeline and counters of a step."""
    timeline = Timeline()
    clock = StateClock(listener=timeline.mark)
    progress = StageProgress(stage=1, stage_count=2, incarnation=1, clock=clock, timeline=timeline)

    def step(plan: StepPlan) -> None:
        clock.enter(WaitReason.HOST)
        clock.enter(WaitReason.RECV, "receive hidden")
        clock.enter(BusyKind.DECODE, "forward")
        clock.enter(WaitReason.HOST, "send feedback")
        clock.enter(WaitReason.HOST)
        progress.count_step(plan, BusyKind.DECODE)

    return step, StageMetrics(progress, "model").page


def engine() -> tuple[Step, Callable[[], object]]:
    """The engine's loop: a plan, and a token for each of its rows."""
    metrics = EngineMetrics("model")
    times = metrics.requests.arrived()
    metrics.requests.scheduled(times, 100)

    def step(plan: StepPlan) -> None:
        metrics.planned(plan, 0)
        for _ in plan.rows:
            metrics.requests.sampled(times)

    return step, lambda: metrics.page(None)


def gateway() -> tuple[Step, Callable[[], object]]:
    """The gateway's loop: one message with a token for each row, as its client receives it."""
    metrics = GatewayMetrics()
    of_models = metrics.of("ns")
    of_models.show_groups({"model": [True, True]}, {"model": 0})
    meter = RequestMeter(of_models, "model", arrived=time.monotonic())
    meter.see(Admitted(prompt_tokens=100))
    token = Delta(text="a", token_ids=(1,))

    def step(plan: StepPlan) -> None:
        for _ in plan.rows:
            meter.see(token)

    done = RequestMeter(of_models, "model", arrived=time.monotonic())
    done.see(Admitted(prompt_tokens=1))
    done.see(token)
    done.see(Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1))
    return step, metrics.registry.exposition


def operator() -> Callable[[], object]:
    """A scrape of an operator with many models of one group of four stages."""
    metrics, cache = OperatorMetrics(), ObjectCache()
    now = datetime.now(UTC).isoformat()
    stages = [{"index": index, "ready": True, "pod": f"m-0-{index}"} for index in range(4)]
    kinds = ("Available", "Progressing", "Degraded", "Ready")
    conditions = [{"type": one, "status": "True", "reason": "AsExpected", "lastTransitionTime": now} for one in kinds]
    group: dict[str, Any] = {"index": 0, "incarnation": 1, "phase": "Ready", "stages": stages}
    for number in range(MODELS):
        metadata = {"name": f"m-{number}", "namespace": "ns", "uid": str(number), "resourceVersion": "1"}
        status = {"groups": [group], "conditions": conditions, "readyReplicas": 1}
        cache.put(pipeline_model.KIND, {"metadata": metadata, "spec": {}, "status": status})
    metrics.expose(cache, lambda: iter(()))
    return metrics.registry.exposition


def plans() -> Iterator[StepPlan]:
    """Decodes of all rows, one after the other."""
    rows = tuple(PlanRow(slot, 1, 30, 1, (), True) for slot in range(ROWS))
    for seq in range(STEPS * REPETITIONS):
        yield StepPlan(seq, 0, (), rows, ROWS, seq - 2, True, False)


def run(step: Step, batch: list[StepPlan]) -> None:
    """Run all plans of a batch."""
    for plan in batch:
        step(plan)


def cpu_nanoseconds(action: Callable[[], object]) -> float:
    """CPU time of this thread."""
    begin = time.thread_time_ns()
    action()
    return float(time.thread_time_ns() - begin)


def main() -> int:
    """Measure and print. Returns 1 if counting takes too long in a process."""
    parts = {"stage": stage(), "engine": engine(), "gateway": gateway()}
    costs: dict[str, list[float]] = {name: [] for name in parts}
    scrapes: dict[str, list[float]] = {name: [] for name in parts}
    source = plans()
    for _ in range(REPETITIONS):
        batch = [next(source) for _ in range(STEPS)]
        for name, (step, render) in parts.items():
            costs[name].append(cpu_nanoseconds(partial(run, step, batch)) / STEPS)
            scrapes[name].append(cpu_nanoseconds(render))
    expensive = []
    for name in parts:
        each, scrape = median(costs[name]), median(scrapes[name])
        share = each / 1e9 / STEP_SECONDS + scrape / 1e9 / SCRAPE_INTERVAL_SECONDS
        if share >= ALLOWED_SHARE:
            expensive.append(name)
        print(  # noqa: T201
            f"{name:9} {each:8.0f} ns a plan of {ROWS} rows, {scrape / 1e6:6.2f} ms a scrape: "
            f"{share:.3%} of steps of {STEP_SECONDS * 1e3:g} ms"
        )
    render = operator()
    whole = median(cpu_nanoseconds(render) for _ in range(5))
    print(f"operator  {whole / 1e6:.0f} ms a scrape of {MODELS} models")  # noqa: T201
    if expensive:
        print(f"{ALLOWED_SHARE:.0%} of a step or more: {', '.join(expensive)}")  # noqa: T201
    return 1 if expensive else 0


if __name__ == "__main__":
    sys.exit(main())
