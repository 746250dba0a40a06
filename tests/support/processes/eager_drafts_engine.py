"""An engine for which drafts always pay: `python eager_drafts_engine.py`, under the pod contract.

Only what steps cost is replaced: they take the same time whatever is in them, where the warm-up would measure it. So
whether a group drafts doesn't hang on how fast tiny models run on a busy machine.
"""

import asyncio
import logging
import sys
from unittest import mock

from stageline_runtime.contract import begin
from stageline_runtime.engine.process import EngineProcess
from stageline_runtime.speculation.settings import DraftSettings
from stageline_runtime.speculation.step_cost import FREE, StepCost

COMMAND = (__file__,)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    contract = begin("engine")
    with (
        mock.patch.object(StepCost, "of_two", return_value=FREE),
        mock.patch.object(DraftSettings, "note_draft_step", return_value=None),
    ):
        sys.exit(asyncio.run(EngineProcess(contract).run()))


if __name__ == "__main__":
    main()
