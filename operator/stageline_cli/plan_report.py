"""A group's plan for people and for programs: a table with totals, or one JSON object. Marks estimates."""

import json
from dataclasses import dataclass

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stageline_api.runtime_config import LayerRange
from stageline_local.node.quantities import format_bytes
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.planning import this_machine
from stageline_runtime.planning.devices import Hardware
from stageline_runtime.planning.group_plan import GroupPlan
from stageline_runtime.planning.predict import StagePrediction, Workload

_PLAIN_WIDTH = 120

ESTIMATES = (
    "Weights and KV capacity follow from the config. Step times, bubble and tokens/s are predictions of steady decode "
    "from the devices' peak figures: real kernels reach less."
)
THIS_MACHINE = "This machine's memory is what is free now; its bandwidth and compute rate are rough guesses per core."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    name: str
    config: ModelConfig
    workload: Workload
    plan: GroupPlan
    hardware: Hardware
    sum_is_measured: bool = False
    """Whether the time of a sum over a stage's ranks, or of an exchange of their rows, was measured."""
    ranks_note: str | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each host or device that can't hold its stages."""
        lacking: dict[str, list[StagePrediction]] = {}
        for stage in self.plan.prediction.stages:
            if stage.missing_bytes:
                lacking.setdefault(self.hardware.devices[stage.stage].host or f"stage {stage.stage}", []).append(stage)
        return tuple(self._shortage(stages) for stages in lacking.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the figures."""
        notes = [ESTIMATES]
        if any(device.name == this_machine.NAME for device in self.hardware.devices):
            notes.append(THIS_MACHINE)
        if self.ranks_note is not None:
            notes.append(self.ranks_note)
        if self.workload.stage_ranks > 1:
            notes.append(self._exchanges())
        if self.plan.ranks_do_not_pay is not None:
            notes.append(f"{self.plan.ranks_do_not_pay}.")
        admitted, asked = self.plan.prediction.admitted_sequences, self.workload.num_sequences
        if 0 < admitted < asked:
            notes.append(
                f"The KV cache holds {admitted} sequences of {self.workload.context_tokens} tokens, not {asked}."
            )
        if self.plan.faster_cut is not None:
            notes.append(
                f"With layers divided for these devices, {ranges_text(self.plan.faster_cut)}, "
                f"{self.plan.faster_tokens_per_second:.0f} tokens/s are predicted: write them to stages[].layers."
            )
        return tuple(notes)

    def _exchanges(self) -> str:
        how = "as measured" if self.sum_is_measured else "a guess: measure it, and give --all-reduce-microseconds"
        takes = f"{self.workload.all_reduce_seconds * 1e6:.1f} µs"
        each = f"Each stage is {self.workload.stage_ranks} ranks, on what the table calls its device each"
        if self.workload.experts > 1:
            return (
                f"{each}, which share its experts and have sequences of their own; weights and step are those of one. "
                f"Gathering their rows takes {takes}, and scattering the experts' results as long, {how}; "
                "a layer with experts waits for both."
            )
        return (
            f"{each}; weights and step are those of one. A sum over them takes {takes}, {how}; a layer waits for two."
        )

    def _shortage(self, stages: list[StagePrediction]) -> str:
        first = stages[0]
        names = ", ".join(str(stage.stage) for stage in stages)
        if len(stages) == 1:
            who = f"stage {names} can't hold its part"
        else:
            who = (
                f"stages {names} can't hold their parts on {self.hardware.devices[first.stage].host}, which they share"
            )
        return (
            f"{who}: {format_bytes(first.missing_bytes)} missing, with {format_bytes(first.usable_bytes)} usable, for "
            f"weights and a cache of one sequence of {self.workload.max_model_len} tokens"
        )


def print_tables(report: PlanReport) -> None:
    """The plan as a table, then its totals, then marked warnings."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(_table(report))
    for line in _totals(report):
        console.print(escape(line), soft_wrap=True)
    for note in report.notes:
        console.print(f"[dim]note:[/dim] {escape(note)}", soft_wrap=True)
    for warning in report.warnings:
        console.print(f"[bold red]warning:[/bold red] {escape(warning)}", soft_wrap=True)


def print_json(report: PlanReport) -> None:
    click.echo(json.dumps(_document(report), indent=2))


def ranges_text(cut: tuple[LayerRange, ...]) -> str:
    """`0-14, 15-29`, as in `stages[].layers`."""
    return ", ".join(f"{layers.first}-{layers.last}" for layers in cut)


def _table(report: PlanReport) -> Table:
    count = report.workload.stage_ranks
    ranks = f", {count} ranks a stage" if count > 1 else ""
    table = Table(title=escape(f"{report.name}: {report.config.num_layers} layers, {report.workload.dtype}{ranks}"))
    weights = "weights/rank" if ranks else "weights"
    for header in ("stage", "device", "layers", "count", weights, "KV capacity", "step", "bubble"):
        table.add_column(header, justify="left" if header in ("device", "layers") else "right", no_wrap=True)
    for stage in report.plan.prediction.stages:
        table.add_row(
            str(stage.stage),
            escape(stage.device),
            f"{stage.layers.first}-{stage.layers.last}",
            str(stage.layers.count),
            format_bytes(stage.weight_bytes),
            f"{stage.kv_capacity_tokens} tokens",
            f"{stage.step_seconds * 1000:.2f} ms",
            f"{stage.bubble:.1%}",
            style="red" if stage.missing_bytes else None,
        )
    return table


def _totals(report: PlanReport) -> list[str]:
    prediction, workload = report.plan.prediction, report.workload
    rate = prediction.tokens_per_second
    shown = "nothing, as it can't be served; the times are" if rate is None else f"{rate:.0f} tokens/s"
    weights = workload.stage_ranks * sum(stage.weight_bytes for stage in prediction.stages)
    return [
        f"cut: {'explicit, from stages[].layers' if report.plan.is_explicit else 'by estimated cost, within memory'}",
        f"limits: {workload.num_sequences} sequences at once, {workload.max_step_tokens} tokens a step",
        f"weights: {format_bytes(weights)} in all; KV capacity: "
        f"{min(stage.kv_capacity_tokens for stage in prediction.stages)} tokens, set by the smallest stage",
        f"predicted: {shown} for {prediction.admitted_sequences or workload.num_sequences} sequences "
        f"({prediction.rows_per_step} rows per step) at {workload.context_tokens} tokens of context, "
        f"{prediction.round_seconds * 1000:.2f} ms per output token",
        f"predicted bubble: {prediction.bubble:.1%} (uneven stages alone {prediction.imbalance_bubble:.1%}, "
        f"token loop of {prediction.loop_seconds * 1000:.2f} ms alone {prediction.loop_bubble:.1%})",
    ]


def _document(report: PlanReport) -> dict[str, object]:
    plan, prediction, workload = report.plan, report.plan.prediction, report.workload
    return {
        "model": report.name,
        "num_layers": report.config.num_layers,
        "dtype": workload.dtype,
        "max_model_len": workload.max_model_len,
        "context_tokens": workload.context_tokens,
        "num_sequences": workload.num_sequences,
        "max_step_tokens": workload.max_step_tokens,
        "ranks": workload.stage_ranks,
        "ranks_that_share_experts": workload.experts,
        "all_reduce_seconds": workload.all_reduce_seconds if workload.stage_ranks > 1 else None,
        "ranks_do_not_pay": plan.ranks_do_not_pay,
        "is_explicit_cut": plan.is_explicit,
        "stages": [_stage_document(stage) for stage in prediction.stages],
        "admitted_sequences": prediction.admitted_sequences,
        "rows_per_step": prediction.rows_per_step,
        "predicted_seconds_per_output_token": prediction.round_seconds,
        "predicted_loop_seconds": prediction.loop_seconds,
        "predicted_bubble": prediction.bubble,
        "predicted_imbalance_bubble": prediction.imbalance_bubble,
        "predicted_loop_bubble": prediction.loop_bubble,
        "predicted_tokens_per_second": prediction.tokens_per_second,
        "faster_cut": None if plan.faster_cut is None else [f"{one.first}-{one.last}" for one in plan.faster_cut],
        "faster_cut_predicted_tokens_per_second": plan.faster_tokens_per_second,
        "warnings": list(report.warnings),
        "notes": list(report.notes),
    }


def _stage_document(stage: StagePrediction) -> dict[str, object]:
    return {
        "stage": stage.stage,
        "device": stage.device,
        "layers": f"{stage.layers.first}-{stage.layers.last}",
        "num_layers": stage.layers.count,
        "weight_bytes": stage.weight_bytes,
        "usable_bytes": stage.usable_bytes,
        "missing_bytes": stage.missing_bytes,
        "kv_capacity_tokens": stage.kv_capacity_tokens,
        "predicted_step_seconds": stage.step_seconds,
        "predicted_bubble": stage.bubble,
    }
