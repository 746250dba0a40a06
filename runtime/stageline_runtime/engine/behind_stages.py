"""Lets a stage end what it is doing before the engine runs on its core.

Where stages have all cores, the results of a step wake the engine on the core of the stage that tells them. As a
process like any other it may take that core at once, and the stage that has yet to hand on its hidden states waits
while the engine makes a plan that nobody needs before the next step ends. Linux never lets a thread of the class
SCHED_BATCH take a core from one of the usual class by waking up: it runs when the core is idle or the other's slice is
over, a few milliseconds later at most, and has the same share of time (sched(7)). On a machine with a core to spare
nothing changes.
"""

import logging
import os

logger = logging.getLogger(__name__)


def run_behind_stages() -> None:
    """For the calling thread and all threads and processes that it starts; call it before any other is started.

    A container runtime that refuses it leaves the engine as it is, which costs time and nothing else; the log says so.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        logger.warning("the engine may interrupt stages on its cores: SCHED_BATCH was refused: %s", error.strerror)
