"""Runs the engine of one group, in the container that `stageline engine` is the entry point of."""

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.contract import begin
from stageline_runtime.engine.behind_stages import run_behind_stages
from stageline_runtime.termination import RuntimeFailure, write_last_words

if TYPE_CHECKING:
    from stageline_runtime.engine.group_core import Computing


def run_engine(computing_of: "Callable[[RuntimeConfig], Computing]") -> NoReturn:
    """Run to the end and exit. Configured by the pod contract alone, whose config decides what computes."""
    try:
        contract = begin("engine", hides_values=True)
    except RuntimeFailure as failure:
        sys.exit(write_last_words(failure.message(None)))
    from stageline_runtime.engine.process import EngineProcess

    computing = computing_of(contract.config)
    if computing.is_told_each_step:  # nothing before this starts a thread
        run_behind_stages()
    sys.exit(asyncio.run(EngineProcess(contract, computing).run()))
