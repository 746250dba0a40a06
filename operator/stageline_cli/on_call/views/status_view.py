"""Facts as tables for a terminal. Pure: returns objects that rich prints."""

from collections import Counter
from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stageline_api.failures import place_of
from stageline_cli.on_call.facts.facts import (
    FailureFacts,
    GroupFacts,
    Health,
    ModelFacts,
    Quantiles,
    Snapshot,
    StageFacts,
)
from stageline_cli.on_call.views.figures import UNKNOWN, age, fine_percent, milliseconds, percent, rate
from stageline_local.node.quantities import format_bytes

_STYLE_OF = {
    Health.HEALTHY: "green",
    Health.SUSPENDED: "dim",
    Health.SCALED_TO_ZERO: "dim",
    Health.DEGRADED: "yellow",
    Health.STARTING: "yellow",
    Health.DOWN: "bold red",
    Health.ENDED: "dim",
}


def fleet_view(snapshot: Snapshot, wide: bool) -> Iterator[RenderableType]:
    yield Text(snapshot.where, style="dim")
    if not snapshot.models:
        yield Text("there is no PipelineModel")
    else:
        yield _fleet_table(snapshot, wide)
    yield from problem_lines(snapshot)


def model_view(snapshot: Snapshot, model: ModelFacts, wide: bool) -> Iterator[RenderableType]:
    """Everything about one model: conditions, groups and stages, traffic, failures."""
    now = snapshot.taken_at
    yield Text.assemble((model.name, "bold"), f", {snapshot.where}: ", (model.health, _STYLE_OF[model.health]))
    yield Text(f"{model.ready_groups} of {model.wanted_groups} groups ready, {model.stage_count} stages each")
    yield Text(f"serves {model.source} as {model.served_name}" + (f" at {model.url}" if model.url else ""))
    yield Text(traffic_line(model))
    table = _table("condition", "holds", "reason", "for", "message")
    for one in model.conditions:
        table.add_row(one.type, "yes" if one.holds else "no", one.reason, age(one.since, now), escape(one.message))
    yield table
    for group in model.groups:
        yield Text("")
        yield Text(group_line(group, snapshot), style="bold")
        if group.waits_for:
            yield Text(f"  waits for {group.waits_for}", style="yellow")
        for line in _pipeline_lines(group):
            yield Text(f"  {line}")
        yield _stage_table(group, snapshot, wide)
    yield from _failure_lines(model.failures, snapshot)
    yield from problem_lines(snapshot)


def group_line(group: GroupFacts, snapshot: Snapshot) -> str:
    restarts = f"{group.restarts_in_window} of {group.max_restarts} restarts in {group.restart_window_seconds} s"
    lived = f" for {age(group.since, snapshot.taken_at)}" if group.since is not None else ""
    return (
        f"group {group.group}: {group.phase}{lived}, incarnation {group.incarnation}, "
        f"revision {group.revision or UNKNOWN}, {restarts}"
    )


def traffic_line(model: ModelFacts) -> str:
    seen = model.traffic
    if seen is None:
        return "traffic: unknown, no gateway was read twice"
    parts = [
        f"{rate(seen.requests_per_second)} requests/s",
        f"{rate(seen.tokens_per_second)} tokens/s",
        f"errors {fine_percent(seen.error_ratio)}",
        f"{seen.in_flight} in flight, {seen.queued} wait for their first token",
        _times("TTFT", seen.first_token),
        _times("TPOT", seen.output_token),
    ]
    return f"traffic of {seen.seconds:.0f} s: " + ", ".join(parts)


def problem_lines(snapshot: Snapshot) -> Iterator[RenderableType]:
    for problem in snapshot.problems:
        yield Text(f"not known: {problem}", style="yellow")


def _times(name: str, seen: Quantiles | None) -> str:
    if seen is None:
        return f"{name} {UNKNOWN}"
    return f"{name} p50 {milliseconds(seen.p50_seconds)} p95 {milliseconds(seen.p95_seconds)}"


def _fleet_table(snapshot: Snapshot, wide: bool) -> Table:
    columns = ["model", "health", "ready", "groups", "revision", "requests/s", "tokens/s", "errors", "bubble"]
    columns += ["namespace", "TTFT p95", "TPOT p95", "URL"] if wide else []
    table = _table(*columns)
    for model in snapshot.models:
        seen = model.traffic
        row: list[RenderableType] = [
            model.name,
            Text(model.health, style=_STYLE_OF[model.health]),
            f"{model.ready_groups}/{model.wanted_groups}",
            _phases(model),
            ", ".join(dict.fromkeys(group.revision for group in model.groups if group.revision)) or UNKNOWN,
            rate(seen.requests_per_second if seen else None),
            rate(model.tokens_per_second),
            fine_percent(seen.error_ratio if seen else None),
            percent(model.bubble),
        ]
        first, output = (seen.first_token, seen.output_token) if seen is not None else (None, None)
        times = [
            milliseconds(first.p95_seconds if first else None),
            milliseconds(output.p95_seconds if output else None),
        ]
        table.add_row(*row, *([model.namespace, *times, model.url or UNKNOWN] if wide else []))
    return table


def _phases(model: ModelFacts) -> str:
    counts = Counter(group.phase for group in model.groups)
    return ", ".join(f"{count} {phase}" for phase, count in counts.items()) or UNKNOWN


def _pipeline_lines(group: GroupFacts) -> Iterator[str]:
    engine, pipeline = group.engine, group.pipeline
    if engine is not None:
        yield (
            f"engine {engine.phase}: {engine.requests_running} running, {engine.requests_waiting} waiting, "
            f"KV {fine_percent(engine.kv_usage_ratio)}, {rate(engine.tokens_per_second)} tokens/s"
        )
    if pipeline is not None and pipeline.bottleneck_stage is not None:
        yield (
            f"bubble {percent(pipeline.bubble)}, busiest is stage {pipeline.bottleneck_stage} "
            f"({percent(pipeline.bottleneck_share)} of the time), imbalance {pipeline.imbalance:.2f}"
        )


def _stage_table(group: GroupFacts, snapshot: Snapshot, wide: bool) -> Table:
    columns = ["stage", "phase", "layers", "memory", "KV", "busy", "wait", "idle", "bubble", "says"]
    table = _table(*columns, *(["pod", "node", "steps", "waits on"] if wide else []))
    for stage in group.stages:
        did = stage.activity
        row: list[RenderableType] = [
            str(stage.stage),
            Text(stage.phase, style="green" if stage.is_ready else "yellow"),
            stage.layers or UNKNOWN,
            UNKNOWN if stage.memory_bytes is None else format_bytes(stage.memory_bytes),
            _kv(stage),
            *(percent(share) for share in _shares(stage)),
            percent(did.bubble if did else None),
            escape(_says(stage, snapshot)),
        ]
        more = [stage.pod, stage.node or UNKNOWN, UNKNOWN if stage.steps is None else str(stage.steps), _reasons(stage)]
        table.add_row(*row, *(more if wide else []))
    return table


def _shares(stage: StageFacts) -> tuple[float | None, float | None, float | None]:
    did = stage.activity
    return (None, None, None) if did is None else (did.busy_share, did.wait_share, did.idle_share)


def _says(stage: StageFacts, snapshot: Snapshot) -> str:
    loaded = "" if stage.loaded_share is None else f"{stage.loaded_share:.0%} loaded "
    since = "" if stage.waiting_since is None else f" (for {age(stage.waiting_since, snapshot.taken_at)})"
    return f"{loaded}{stage.message}{since}"


def _kv(stage: StageFacts) -> str:
    if stage.kv_tokens is None or not stage.kv_capacity_tokens:
        return UNKNOWN
    return f"{stage.kv_tokens}/{stage.kv_capacity_tokens}"


def _reasons(stage: StageFacts) -> str:
    if stage.activity is None:
        return UNKNOWN
    longest = sorted(stage.activity.wait_share_by_reason.items(), key=lambda each: -each[1])
    return ", ".join(f"{reason} {percent(share)}" for reason, share in longest if share >= 0.005) or UNKNOWN


def _failure_lines(failures: tuple[FailureFacts, ...], snapshot: Snapshot) -> Iterator[RenderableType]:
    if failures:
        yield Text("\nlast failures, newest first", style="bold")
    for one in failures:
        who = "" if one.stage is None else f" {place_of(one.stage, one.rank)}"
        what = f" {one.container}" if one.container else ""
        code = "" if one.exit_code is None else f", exit status {one.exit_code}"
        yield Text(
            f"  {age(one.time, snapshot.taken_at)} ago, group {one.group} incarnation {one.incarnation}{who}{what}: "
            f"{one.failure_class}{code}: {one.message}"
        )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column not in ("message", "says"))
    return table
