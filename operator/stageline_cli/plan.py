"""`stageline plan`: a model's cut, each stage's memory, and predicted speed; it starts nothing.

Needs only the model's `config.json`; for an architecture that Stageline's runtime does not implement, also the headers
of its weights.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.manifests.manifest_loader import load_one_model, refuse
from stageline_api.resource.field_problem import show_value
from stageline_api.resource.pipeline_model import PipelineModel, model_problems
from stageline_api.resource.serving.engine import MOST_RANKS
from stageline_api.resource.serving.model_source import FileSource, ModelSource
from stageline_api.runtime_config import StepLimits
from stageline_cli.plan_ranks import RankOptions, all_reduce_seconds, ranks_to_plan, with_ranks
from stageline_cli.plan_report import PlanReport, print_json, print_tables
from stageline_local.session.instance import default_cache_dir
from stageline_operator.planner.objects.pod_resources import find_step_limits
from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError, sized_model_config
from stageline_runtime.model_facts.number_format import choose_number_format
from stageline_runtime.planning.cpu_features import cpu_features, has_bfloat16_units
from stageline_runtime.planning.devices import PRESETS, Hardware, hardware_from_preset, read_hardware
from stageline_runtime.planning.group_plan import plan_group
from stageline_runtime.planning.predict import Workload
from stageline_runtime.planning.this_machine import this_machine
from stageline_runtime.prepare.cache import prepared_model_dir

USUAL_CONTEXT_TOKENS: Final = 1024
MOST_SUM_MICROSECONDS: Final = 1_000_000

_SIZES: Final = ("num_layers", "hidden_size", "intermediate_size", "head_dim", "vocab_size", "context_length")
"""Sizes that are divisors or factors of the arithmetic."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--devices",
    metavar="FILE|PRESET",
    help=f"Hardware of the stages: a devices file, or one of {', '.join(PRESETS)}. Default: this machine.",
)
@click.option(
    "--model-config",
    type=click.Path(path_type=Path),
    help="The model's config.json, if the model isn't on this machine.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), help="Concurrent sequences. Default: engine.maxNumSeqs, or its default."
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help=f"Tokens in each sequence's cache. Default: {USUAL_CONTEXT_TOKENS}, or engine.maxModelLen when that is less.",
)
@click.option(
    "--tensor",
    type=click.IntRange(min=1, max=MOST_RANKS),
    help="Ranks that share each layer of a stage. Default: parallelism.tensor.",
)
@click.option(
    "--expert",
    type=click.IntRange(min=1, max=MOST_RANKS),
    help="Ranks that share the experts of a stage. Default: parallelism.expert.",
)
@click.option(
    "--all-reduce-microseconds",
    type=click.FloatRange(min=0, max=MOST_SUM_MICROSECONDS),
    help="Measured time of one exchange between ranks. Default: an estimate, which the plan prints.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--strict", is_flag=True, help="Exit with status 1 if a stage doesn't fit.")
def plan(
    file: Path,
    devices: str | None,
    model_config: Path | None,
    batch: int | None,
    context: int | None,
    tensor: int | None,
    expert: int | None,
    all_reduce_microseconds: float | None,
    as_json: bool,
    strict: bool,
) -> int:
    """Show the cut, the memory and the predicted speed of the PipelineModel in FILE.

    Reads the model's config.json and no weights. Speeds are predictions from the hardware's figures, not measurements.
    """
    options = RankOptions(tensor=tensor, expert=expert)
    model = with_ranks(load_one_model(file), options)
    config = find_config(model, model_config)
    refuse(
        [
            problem.placed(str(file), None)
            for problem in model_problems(model.spec, config.num_layers, config.context_length)
        ]
    )
    stage_count = model.spec.parallelism.pipeline
    ranks = ranks_to_plan(model, config, options)
    alone = build_workload(model, config, batch, context, on_this_machine=devices is None)
    rows = -(-alone.num_sequences // stage_count)
    seconds = all_reduce_seconds(all_reduce_microseconds, config, rows, on_devices=alone.on_devices)
    workload = replace(alone, ranks=ranks.tensor, experts=ranks.expert, all_reduce_seconds=seconds)
    hardware = find_hardware(devices, stage_count, ranks.count)
    group = plan_group(config, hardware, workload, model.spec.stage_layers, find_hardware(devices, stage_count))
    report = PlanReport(
        name=model.name,
        config=config,
        workload=workload,
        plan=group,
        hardware=hardware,
        sum_is_measured=all_reduce_microseconds is not None,
        ranks_note=ranks.note,
    )
    (print_json if as_json else print_tables)(report)
    return 1 if strict and report.warnings else 0


def find_config(model: PipelineModel, given: Path | None) -> ModelConfig:
    """The model's config, from the given file or from the model on this machine; raises `UserError`."""
    directory = given or _local_directory(model)
    if directory.is_file():
        path = directory
    elif (directory / "config.json").is_file():
        path = directory / "config.json"
    else:
        raise UserError(_how_to_get(model, given, directory), USAGE_EXIT_CODE)
    return _read_config(path)


def build_workload(
    model: PipelineModel, config: ModelConfig, batch: int | None, context: int | None, *, on_this_machine: bool
) -> Workload:
    """The workload of the plan; raises UserError if the context is longer than a sequence may be.

    A hardware description does not name the kind of device: `engine.device` does, and `auto` assumes GPUs.
    """
    engine = model.spec.engine
    on_cpus = engine.name == "stageline" and (engine.device == "cpu" or on_this_machine)
    max_model_len = engine.max_model_len or config.context_length
    limits = find_step_limits(model) or StepLimits.of(
        engine.max_num_seqs, engine.max_num_batched_tokens, on_gpus=not on_cpus
    )
    if context is not None and context > max_model_len:
        rule = f"must be at most {max_model_len}, the longest sequence"
        raise UserError(f"--context: {context} is not allowed: {rule}", USAGE_EXIT_CODE)
    return Workload(
        dtype=choose_number_format(
            engine.dtype, config.dtype, on_devices=not on_cpus, slow_cpus=_slow_cpu(on_cpus and on_this_machine)
        ).dtype,
        max_model_len=max_model_len,
        num_sequences=batch or limits.max_num_seqs,
        context_tokens=context or min(USUAL_CONTEXT_TOKENS, max_model_len),
        max_step_tokens=limits.max_num_batched_tokens,
        on_devices=not on_cpus,
        draft=_find_draft(model),
    )


def _slow_cpu(is_asked: bool) -> str:
    return "this machine's CPU" if is_asked and not has_bfloat16_units(cpu_features()) else ""


def find_hardware(devices: str | None, stage_count: int, ranks: int = 1) -> Hardware:
    """Hardware of each rank: from `--devices`, else its share of this machine.

    Raises `UserError` for a file that is refused.
    """
    if devices is None:
        return this_machine(stage_count, ranks)
    if devices in PRESETS:
        return hardware_from_preset(devices, stage_count)
    path = Path(devices)
    if not path.exists():
        rule = f"is neither a file nor one of the presets {', '.join(PRESETS)}"
        raise UserError(f"--devices: {show_value(devices)} {rule}", USAGE_EXIT_CODE)
    return read_hardware(path, stage_count)


def _read_config(path: Path) -> ModelConfig:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(parsed, dict):
            raise UnsupportedModelError("must hold a JSON object")
        config = sized_model_config(parsed, path.parent)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}", USAGE_EXIT_CODE) from error
    except (UnsupportedModelError, ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}", USAGE_EXIT_CODE) from error
    for name in _SIZES:
        if getattr(config, name) < 1:
            raise UserError(f"{path}: {name} is {getattr(config, name)}; it must be at least 1", USAGE_EXIT_CODE)
    return config


def _find_draft(model: PipelineModel) -> ModelConfig | None:
    """The draft model's config, None without one; raises UserError if it is not on this machine."""
    speculative = model.spec.engine.speculative
    if speculative is None or speculative.draft is None:
        return None
    directory = _directory_of(speculative.draft.parsed_source, model)
    if not (directory / "config.json").is_file():
        source, field = speculative.draft.source, "spec.engine.speculative.draft.source"
        fetch = f"stageline prepare --source {source} --cache-dir {directory.parent}"
        hint = "" if isinstance(speculative.draft.parsed_source, FileSource) else f"; fetch it with `{fetch}`"
        raise UserError(f"{field}: there is no config.json of {source} on this machine{hint}", USAGE_EXIT_CODE)
    return _read_config(directory / "config.json")


def _local_directory(model: PipelineModel) -> Path:
    return _directory_of(model.spec.model.parsed_source, model)


def _directory_of(source: ModelSource, model: PipelineModel) -> Path:
    cache = model.spec.model.cache.host_path
    return prepared_model_dir(source.canonical, default_cache_dir() if cache is None else Path(cache))


def _how_to_get(model: PipelineModel, given: Path | None, directory: Path) -> str:
    if given is not None:
        return f"--model-config: {given} is neither a config.json nor a directory that holds one"
    source = model.spec.model.parsed_source
    if isinstance(source, FileSource):
        return f"spec.model.source: there is no config.json in {source.path}; give one with --model-config"
    fetch = f"stageline prepare --source {source.canonical} --cache-dir {directory.parent}"
    return (
        f"the config.json of {source.canonical} is not on this machine: give one with --model-config (no weights are "
        f"needed), or fetch the model with `{fetch}`"
    )
