"""`stageline engine`: the container entry point of a group's engine, for every backend."""

from typing import TYPE_CHECKING, assert_never

import click

from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.engine.command import run_engine

if TYPE_CHECKING:
    from stageline_runtime.engine.core_life import CoreLife


@click.command("engine")
def engine() -> None:
    """Run the engine of one group. Only the pod contract's environment configures it."""
    run_engine(core_class_of)


def core_class_of(config: RuntimeConfig) -> "type[CoreLife]":
    """The engine core for the stages of a group with this config."""
    match config.engine_name:
        case "stageline":
            from stageline_runtime.engine.core import EngineCore

            return EngineCore
        case "vllm":
            from stageline_vllm.engine.core import VllmCore

            return VllmCore
        case _:
            assert_never(config.engine_name)
