"""An engine with a bug in its scheduler: `python broken_engine.py BUG`, under the pod contract.

Once requests have come, `complete` or `schedule` raises, or no plan is ever made.
"""

import asyncio
import logging
import sys
from typing import Any
from unittest import mock

from stageline_runtime.contract import begin
from stageline_runtime.engine import process
from stageline_runtime.engine.process import EngineProcess
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.plan_bus.messages import StepPlan

PATH = __file__
_complete, _schedule = Scheduler.complete, Scheduler.schedule


def complete_wrongly(scheduler: Scheduler, *arguments: Any) -> Any:
    if scheduler.has_requests:
        raise KeyError("slot 3")
    return _complete(scheduler, *arguments)


def schedule_wrongly(scheduler: Scheduler) -> StepPlan | None:
    if scheduler.has_requests:
        raise KeyError("slot 4")
    return _schedule(scheduler)


def schedule_nothing(_scheduler: Scheduler) -> StepPlan | None:
    return None


BUGS = {
    "complete": ("complete", complete_wrongly),
    "schedule": ("schedule", schedule_wrongly),
    "nothing": ("schedule", schedule_nothing),
}


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    contract = begin("engine")
    method, broken = BUGS[sys.argv[1]]
    with mock.patch.object(Scheduler, method, broken), mock.patch.object(process, "WATCHDOG_GRACE_SECONDS", 0.0):
        sys.exit(asyncio.run(EngineProcess(contract).run()))


if __name__ == "__main__":
    main()
