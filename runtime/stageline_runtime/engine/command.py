"""Runs the engine of one group, in the container that `stageline engine` is the entry point of.

Where stages have all cores, the results of a step wake the engine on the core of the stage that reports them. As a
process like any other it may take that core at once, and the stage that has yet to hand on its hidden states waits
while the engine makes a plan that nobody needs before the next step ends. Linux never lets a thread of the class
SCHED_BATCH take a core from one of the usual class by waking up: it runs when the core is idle or the other's slice is
over, a few milliseconds later at most, and has the same share of time (sched(7)). On a machine with a core to spare
nothing changes.
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
    """Run to the end and exit. Configured by the pod contract alone, whose config decides the core."""
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
    """For the calling thread and all threads and processes that it starts; call it before any other is started.

    A container runtime that refuses it leaves the engine as it is, which costs time and nothing else; the log says so.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        logger.warning("the engine may interrupt stages on its cores: SCHED_BATCH was refused: %s", error.strerror)
