"""`stageline engine`: the container entry point of a group's engine, whatever computes for it."""

from typing import TYPE_CHECKING, assert_never

import click

from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.engine.command import run_engine

if TYPE_CHECKING:
    from stageline_runtime.engine.group_core import Computing


@click.command("engine")
def engine() -> None:
    """Run the engine of one group. Configured by the pod contract's environment alone."""
    run_engine(computing_of)


def computing_of(config: RuntimeConfig) -> "Computing":
    """What runs the stages of a group with this config."""
    match config.engine_name:
        case "stageline":
            from stageline_runtime.engine.group_core import OWN_RUNTIME

            return OWN_RUNTIME
        case "vllm":
            from stageline_vllm.engine.group_core import VLLM

            return VLLM
        case _:
            assert_never(config.engine_name)
