"""`stageline` that stops itself in the middle of writing a model's weights, as by SIGSTOP; SIGCONT lets it go on.

Run as a program, with the arguments of `stageline`. Who waits for it sees a stopped process, however slow the machine.
"""

import os
import signal
import sys
from types import FrameType
from typing import Any, Final

from stageline_cli.main import main

WRITES_BEFORE_STOP: Final = 3
"""The file's header and some of its tensors."""
_writes: list[str] = []


def _stop_at_a_write(_frame: FrameType, event: str, called: Any) -> None:
    if event != "c_call" or called.__name__ != "write":
        return
    _writes.append(event)
    if len(_writes) == WRITES_BEFORE_STOP:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGSTOP)


def _watch_for_weights(event: str, arguments: tuple[Any, ...]) -> None:
    """The interpreter tells of every file that is opened (PEP 578)."""
    if event == "open" and not _writes and str(arguments[0]).endswith("/model/model.safetensors"):
        sys.setprofile(_stop_at_a_write)


if __name__ == "__main__":
    sys.addaudithook(_watch_for_weights)
    main()
