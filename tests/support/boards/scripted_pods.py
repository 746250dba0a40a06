"""What the processes of a group count while a script says how it does: stages and the engine."""

from boards.metric_history import ScrapedTarget
from boards.scripted_moments import Group, spread_around
from stageline_api.health import Phase
from stageline_runtime import metric_names as runtime


def run_stage(target: ScrapedTarget, name: str, group: Group, stage: int, seconds: float) -> None:
    """One stage's counters and gauges."""
    its = {"model_name": name, "stage": str(stage)}
    busy, wait = group.busy(stage) * seconds, group.wait(stage) * seconds
    steps = group.steps_per_second * seconds
    rows = max(group.running // len(group.step_seconds), 1)
    reason = "recv" if stage else "feedback"
    for kind, part in (("decode", 0.9), ("prefill", 0.1), ("mixed", 0.0), ("dummy", 0.0)):
        target.count(runtime.STAGE_BUSY, busy * part, kind=kind, **its)
        target.count(runtime.STAGE_STEPS, steps * part, kind=kind, **its)
        target.count(runtime.STAGE_TOKENS, steps * part * rows, kind=kind, **its)
        if part:
            target.observe(runtime.STAGE_STEP, [(group.step_seconds[stage], steps * part)], kind=kind, **its)
    for each in ("recv", "send", "feedback", "host", "starved"):
        target.count(runtime.STAGE_WAIT, wait * (each == reason), reason=each, **its)
    target.count(runtime.STAGE_IDLE, max(seconds - busy - wait, 0.0), **its)
    target.count(runtime.STAGE_WALL, seconds, **its)
    for graph in ("off", "piecewise", "full"):
        target.count(runtime.STAGE_GRAPH_STEPS, steps * (graph == "full"), graph=graph, **its)
    for tensor in ("hidden", "feedback"):
        target.count(runtime.P2P_BYTES, steps * rows * 1152, tensor=tensor, **its)
    if busy + wait:
        target.show(runtime.STAGE_BUBBLE, wait / (busy + wait), **its)
    else:
        target.hide(runtime.STAGE_BUBBLE)
    held = {
        runtime.STAGE_LAYERS: 10, runtime.STAGE_MEMORY: 3e9, runtime.STAGE_KV_SLOTS: 48,
        runtime.STAGE_KV_CAPACITY: 98304, runtime.STAGE_KV_TOKENS: group.kv_usage * 98304,
        runtime.STAGE_INCARNATION: group.incarnation, runtime.STAGE_LACKS_KERNELS: 0,
    }  # fmt: skip
    for spec, value in held.items():
        target.show(spec, value, **its)
    for phase in Phase:
        target.show(runtime.STAGE_PHASE, float(phase == group.stage_phase), phase=phase, **its)
    for phase, spent in ((Phase.CONNECTING, 1.5), (Phase.LOADING, 20.0), (Phase.WARMING, 4.0)):
        target.show(runtime.STAGE_STARTUP, spent, phase=phase, **its)
    for rank, waited in enumerate((0.1, 0.3)):
        own = its | {"rank": str(rank)}
        target.count(runtime.RANK_BUSY, busy, **own)
        target.count(runtime.RANK_EXCHANGE, busy * waited, **own)
        target.show(runtime.RANK_MEMORY, 1.5e9, **own)
    target.show(runtime.STAGE_BUILD_INFO, 1, version="0.1.0", **its)


def run_engine(target: ScrapedTarget, name: str, group: Group, seconds: float) -> None:
    """The engine's counters and gauges."""
    its = {"model_name": name}
    stages = len(group.step_seconds)
    steps = group.steps_per_second * seconds
    rows = max(group.running // stages, 1)
    requests = steps * rows / 80
    target.show(runtime.NUM_REQUESTS_RUNNING, group.running, **its)
    target.show(runtime.NUM_REQUESTS_WAITING, group.waiting, **its)
    target.show(runtime.KV_CACHE_USAGE, group.kv_usage, **its)
    for state, part in (("held", group.kv_usage), ("cached", 0.0), ("free", 1 - group.kv_usage)):
        target.show(runtime.KV_BLOCKS, part * 6144, state=state, **its)
    target.show(runtime.PLANS_IN_FLIGHT, stages if group.running else 0, **its)
    for cohort in range(stages):
        target.show(runtime.COHORT_REQUESTS, group.running // stages, cohort=str(cohort), **its)
    for stage in range(stages):
        target.show(runtime.KV_ROOM, 98304 * (1 + stage), stage=str(stage), **its)
    target.count(runtime.PROMPT_TOKENS, requests * 200, **its)
    target.count(runtime.GENERATION_TOKENS, requests * 80, **its)
    target.count(runtime.PREEMPTIONS, group.preemptions_per_second * seconds, **its)
    target.count(runtime.PREFIX_CACHE_QUERIES, requests * 200, **its)
    target.count(runtime.PREFIX_CACHE_HITS, requests * 50, **its)
    target.count(runtime.PLANS, steps, **its)
    drafted = group.drafted_rows_per_second * seconds
    target.count(runtime.DRAFTED_ROWS, drafted, **its)
    target.count(runtime.DRAFT_TOKENS, 4 * drafted, **its)
    target.count(runtime.ACCEPTED_TOKENS, 3 * drafted, **its)
    for place in range(3):
        target.count(runtime.ACCEPTED_AT, drafted, position=str(place), **its)
    for why in ("stop", "length", "abort"):
        target.count(runtime.REQUEST_SUCCESS, requests * (why == "stop"), finished_reason=why, **its)
    target.show(runtime.ENGINE_BUILD_INFO, 1, version="0.1.0", **its)
    if not steps:
        return
    typical = {
        runtime.REQUEST_QUEUE_TIME: (group.queue_seconds, requests), runtime.REQUEST_PREFILL_TIME: (0.2, requests),
        runtime.REQUEST_DECODE_TIME: (4.0, requests), runtime.REQUEST_INFERENCE_TIME: (4.2, requests),
        runtime.REQUEST_PROMPT_TOKENS: (200, requests), runtime.REQUEST_GENERATION_TOKENS: (80, requests),
        runtime.FEEDBACK_LATENCY: (0.002, seconds),
    }  # fmt: skip
    for spec, (value, times) in typical.items():
        target.observe(spec, spread_around(value, times), **its)
    target.observe(runtime.COHORT_ROWS, [(rows, steps)], **its)
    target.observe(runtime.ITERATION_TOKENS, [(rows, steps)], **its)
    for stage in range(1, stages):
        target.observe(runtime.P2P_LATENCY, spread_around(0.0004, seconds), stage=str(stage), **its)
