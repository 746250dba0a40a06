"""Whether a directory holds a model that this runtime can serve, and whether the asked cut fits it. Reads only."""

from collections.abc import Callable
from pathlib import Path

from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.model_facts.foreign_model import read_foreign_model
from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError, read_model_config
from stageline_runtime.model_facts.weight_files import weight_file_names
from stageline_runtime.planning.cut import CutError, cut_layers
from stageline_runtime.prepare.cache import read_manifest
from stageline_runtime.prepare.errors import BadConfigError, PrepareError

OWN_ENGINE = "stageline"
"""As `spec.engine.name` has it."""
ConfigReader = Callable[[Path, str], ModelConfig]
"""Reads a directory's config as one engine needs it, and refuses what that can't run; the text names the source."""


def config_reader_of(engine_name: str) -> ConfigReader:
    """What a model must be for an engine: only the own runtime has families; another says itself what it can't run."""
    return read_supported_config if engine_name == OWN_ENGINE else read_config_of_any


def read_supported_config(model_dir: Path, source: str) -> ModelConfig:
    """The model's config; raises BadConfigError where it can't be read, or this runtime can't run it."""
    try:
        return read_model_config(model_dir)
    except UnsupportedModelError as error:
        raise BadConfigError(f"the model {source} can't be served: {error}") from error


def read_config_of_any(model_dir: Path, source: str) -> ModelConfig:
    """The same of a model that another engine runs: it may be of any family."""
    try:
        return read_foreign_model(model_dir)
    except UnsupportedModelError as error:
        raise BadConfigError(f"the model {source} can't be served: {error}") from error


def check_model_files(model_dir: Path, source: str) -> None:
    """Check that config, tokenizer and all weight files exist, except shards that stages fetch themselves.

    Raises:
        PrepareError: a file is missing; the message names it.
    """
    if not model_dir.is_dir():
        raise PrepareError(f"{source}: there is no directory {model_dir}")
    manifest = read_manifest(model_dir)
    promised = frozenset[str]() if manifest is None else manifest.shards.keys()
    for name in ("config.json", "tokenizer.json", *weight_files(model_dir, source)):
        if name not in promised and not (model_dir / name).is_file():
            raise PrepareError(f"{source}: {name} is missing in {model_dir}")


def check_cut(config: RuntimeConfig, model: ModelConfig) -> None:
    """Check that the asked stages fit the model's layers.

    Raises:
        BadConfigError: more stages than layers, or explicit ranges that don't cover the layers.
    """
    if config.stage_count > model.num_layers:
        raise BadConfigError(
            f"spec.parallelism.pipeline is {config.stage_count}, but the model has {model.num_layers} layers; "
            f"use at most {model.num_layers}"
        )
    try:
        cut_layers(
            model.num_layers,
            config.stage_count,
            layer_cost=1.0,
            embedding_cost=0.0,
            head_cost=0.0,
            explicit=config.stage_layers,
        )
    except CutError as error:
        raise BadConfigError(error.message) from error


def weight_files(model_dir: Path, source: str) -> list[str]:
    """Names of the model's weight files, from its index where it has one and no single file.

    Raises:
        PrepareError: the index can't be read.
    """
    try:
        return weight_file_names(model_dir)
    except UnsupportedModelError as error:
        raise PrepareError(f"{source}: {error}") from error
