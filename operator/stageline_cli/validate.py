"""`stageline validate`: every problem of every file, one line each, before anything is started or applied.

If a model's `config.json` is on this machine (a `file://` directory, or the model cache) the cut and the maximum length
are checked against it too.
"""

from pathlib import Path

import click

from stageline_api.errors import USAGE_EXIT_CODE
from stageline_api.manifests.manifest_loader import load_manifests
from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.pipeline_model import PipelineModel, model_problems
from stageline_local.session.instance import default_cache_dir


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
            problems.extend(
                problem.placed(str(file), document) for problem in local_config_problems(model, default_cache_dir())
            )
        for problem in problems:
            click.echo(str(problem), err=True)
        if not problems:
            for model in loaded.models:
                click.echo(f"{file}: {model.name} ok")
        refused = refused or bool(problems)
    return USAGE_EXIT_CODE if refused else 0


def local_config_problems(model: PipelineModel, cache_dir: Path) -> list[FieldProblem]:
    """Problems of a PipelineModel with its model's config; empty if the config is not on this machine.

    `cache_dir` is the default model cache.
    """
    from stageline_runtime.model_facts.foreign_model import read_foreign_model
    from stageline_runtime.model_facts.model_config import UnsupportedModelError, read_model_config
    from stageline_runtime.prepare.cache import prepared_model_dir

    directory = prepared_model_dir(
        model.spec.model.parsed_source.canonical, Path(model.spec.model.cache.host_path or cache_dir)
    )
    if not directory.joinpath("config.json").is_file():
        return []
    try:
        config = (
            read_model_config(directory) if model.spec.engine.name == "stageline" else read_foreign_model(directory)
        )
    except UnsupportedModelError as error:
        value = show_value(model.spec.model.source)
        return [FieldProblem(path="spec.model.source", value=value, rule=str(error))]
    return model_problems(model.spec, config.num_layers, config.context_length)
