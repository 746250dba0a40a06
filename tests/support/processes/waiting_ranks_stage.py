"""A stage whose ranks stand where ranks stand while their libraries load: `python waiting_ranks_stage.py`.

Supervisor and signals are the real ones. A rank does nothing, for ever; it has no answer to SIGTERM but the kernel's,
or, with `HEEDLESS` in the environment, writes that it has heard and goes on waiting.
"""

import os
import signal
import sys
from typing import NoReturn

from stageline_api import env
from stageline_runtime.contract import begin
from stageline_runtime.stage.ranks.supervisor import RankSupervisor

HEEDLESS = "WAITING_RANKS_ARE_HEEDLESS"


def _wait() -> NoReturn:
    if os.environ.get(HEEDLESS):
        signal.signal(signal.SIGTERM, lambda *_: _say("has heard"))
    _say("waits")
    while True:
        signal.pause()


def _say(what: str) -> None:
    print(f"rank {os.environ[env.STAGE_RANK]} {what}", flush=True)  # noqa: T201 - its log


if __name__ == "__main__":
    if env.STAGE_RANK in os.environ:
        _wait()
    sys.exit(RankSupervisor(begin("stage"), command=(__file__,)).run())
