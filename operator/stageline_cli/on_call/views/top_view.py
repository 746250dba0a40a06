"""One frame of `stageline top`: each group's stages as bars of busy, wait and idle. Pure."""

from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stageline_cli.on_call.facts.facts import GroupFacts, ModelFacts, Snapshot, StageActivity
from stageline_cli.on_call.views.figures import UNKNOWN, fine_percent, percent, rate
from stageline_cli.on_call.views.status_view import group_line, problem_lines, traffic_line

LONGEST_BAR_CELLS: Final = 40
_SHORTEST_BAR_CELLS: Final = 10
_BESIDE_BAR_CELLS: Final = 56
"""Width of the figures, so that a bar also fits a terminal of 80 columns."""
BUSY, WAIT, IDLE = "█", "▒", "·"


def top_view(snapshot: Snapshot, width_cells: int) -> Iterator[RenderableType]:
    """A heading, each model with its groups, and read errors, for a terminal of this width."""
    clock = snapshot.taken_at.astimezone()
    yield Text(f"{snapshot.where}, {clock:%H:%M:%S}    {BUSY} busy  {WAIT} wait  {IDLE} idle", style="dim")
    if not snapshot.models:
        yield Text("there is no PipelineModel")
    for model in snapshot.models:
        yield from _model(model, snapshot, width_cells)
    yield from problem_lines(snapshot)


def bar(activity: StageActivity | None, cells: int) -> Text:
    """Shares as cells that sum to `cells`; blank without an activity."""
    if activity is None:
        return Text(" " * cells)
    busy = round(activity.busy_share * cells)
    wait = min(cells - busy, round(activity.wait_share * cells))
    return Text.assemble((BUSY * busy, "green"), (WAIT * wait, "yellow"), (IDLE * (cells - busy - wait), "dim"))


def _model(model: ModelFacts, snapshot: Snapshot, width_cells: int) -> Iterator[RenderableType]:
    yield Text("")
    ready = f"{model.ready_groups} of {model.wanted_groups} groups ready"
    yield Text.assemble((model.name, "bold"), f": {model.health}, {ready}")
    yield Text(traffic_line(model))
    for group in model.groups:
        yield Text(group_line(group, snapshot), style="bold")
        if group.waits_for:
            yield Text(f"  waits for {group.waits_for}", style="yellow")
        yield Text(f"  {_group_figures(group)}")
        yield _bars(group, min(LONGEST_BAR_CELLS, max(_SHORTEST_BAR_CELLS, width_cells - _BESIDE_BAR_CELLS)))


def _group_figures(group: GroupFacts) -> str:
    engine, pipeline = group.engine, group.pipeline
    parts = []
    if engine is not None:
        parts += [
            f"running {engine.requests_running}",
            f"waiting {engine.requests_waiting}",
            f"KV {fine_percent(engine.kv_usage_ratio)}",
            f"{rate(engine.tokens_per_second)} tokens/s",
        ]
        if engine.draft_acceptance is not None:
            parts.append(f"drafts {percent(engine.draft_acceptance)} accepted")
        if engine.tokens_per_drafted_row is not None:
            parts.append(f"{engine.tokens_per_drafted_row:.1f} tokens a drafted row")
    if pipeline is not None:
        parts.append(f"bubble {percent(pipeline.bubble)}")
        if pipeline.bottleneck_stage is not None:
            share = percent(pipeline.bottleneck_share)
            parts.append(f"bottleneck stage {pipeline.bottleneck_stage} ({share} busy)")
            parts.append(f"imbalance {pipeline.imbalance:.2f}")
    return ", ".join(parts) or "no figures yet"


def _bars(group: GroupFacts, cells: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("  stage", "", "busy", "wait", "idle", "bubble", "layers", "phase"):
        table.add_column(column, no_wrap=True)
    for stage in group.stages:
        did = stage.activity
        shares = (None,) * 4 if did is None else (did.busy_share, did.wait_share, did.idle_share, did.bubble)
        table.add_row(
            f"  {stage.stage}",
            bar(did, cells),
            *(percent(share) for share in shares),
            stage.layers or UNKNOWN,
            Text(stage.phase, style="green" if stage.is_ready else "yellow"),
        )
    return table
