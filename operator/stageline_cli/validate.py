"""`stageline validate`: every problem of every file, one line each, before anything is started or applied.

Where a model's `config.json` is at hand (a `file://` directory on this machine) the cut is checked against it too.
"""

from pathlib import Path

import click

from stageline_api.errors import USAGE_EXIT_CODE
from stageline_api.field_problem import FieldProblem, show_value
from stageline_api.manifest_loader import load_manifests
from stageline_api.model_source import FileSource
from stageline_api.pipeline_model import PipelineModel, check_cut


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
def validate(files: tuple[Path, ...]) -> int:
    """Check PipelineModel files.

    Prints one line for each problem and exits with status 2, or `FILE: name ok` for each model and exits with 0.
    """
    refused = False
    for file in files:
        loaded = load_manifests(file)
        problems = list(loaded.problems)
        for model, document in zip(loaded.models, loaded.documents, strict=True):
            problems.extend(problem.placed(str(file), document) for problem in local_config_problems(model))
        for problem in problems:
            click.echo(str(problem), err=True)
        if not problems:
            for model in loaded.models:
                click.echo(f"{file}: {model.name} ok")
        refused = refused or bool(problems)
    return USAGE_EXIT_CODE if refused else 0


def local_config_problems(model: PipelineModel) -> list[FieldProblem]:
    """What is wrong between a PipelineModel and its model's config; empty where the config is not on this machine."""
    source = model.spec.model.parsed_source
    if not isinstance(source, FileSource) or not (directory := Path(source.path)).joinpath("config.json").is_file():
        return []
    from stageline_runtime.model_config import UnsupportedModelError, read_model_config

    try:
        config = read_model_config(directory)
    except UnsupportedModelError as error:
        value = show_value(model.spec.model.source)
        return [FieldProblem(path="spec.model.source", value=value, rule=str(error))]
    return check_cut(model.spec, config.num_layers)
