"""Runs the engine of one group; the entry point of the `stageline engine` container.

Where stages use all cores, a step's results wake the engine on the core of the stage that reports them. A normal
process may preempt that stage, which then sends its hidden states late. The plan that the engine makes in that time
isn't needed before the next step ends. A waking SCHED_BATCH thread never preempts a SCHED_OTHER thread: it runs
when the core is idle or the other's time slice ends, a few milliseconds later at most. It gets the same share of
time (sched(7)). On a machine with a spare core this changes nothing.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.contract import begin
from stageline_runtime.termination import RuntimeFailure, write_last_words

if TYPE_CHECKING:
    from stageline_runtime.engine.core_life import CoreLife

logger = logging.getLogger(__name__)


def run_engine(core_class_of: "Callable[[RuntimeConfig], type[CoreLife]]") -> NoReturn:
    """Run to the end and exit. The pod contract is the only configuration; its config selects the core."""
    try:
        contract = begin("engine", hides_values=True)
    except RuntimeFailure as failure:
        sys.exit(write_last_words(failure.message(None)))
    from stageline_runtime.engine.process import EngineProcess

    core_class = core_class_of(contract.config)
    if core_class.needs_step_plans:  # nothing before this starts a thread
        run_behind_stages()
    sys.exit(asyncio.run(EngineProcess(contract, core_class).run()))


def run_behind_stages() -> None:
    """Set SCHED_BATCH for the calling thread and all threads and processes that it starts; call it before any is
    started.

    A container runtime that refuses this only costs time; the engine logs a warning and continues.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        logger.warning("the engine may interrupt stages on its cores: SCHED_BATCH was refused: %s", error.strerror)
