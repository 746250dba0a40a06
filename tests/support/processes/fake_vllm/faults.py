"""What the stand-in is told to do wrong, by the environment: `FAKE_VLLM_FAULTS=1:load:no-weights,0:step20:hang`.

Each fault is RANK:MOMENT:DEED. Exceptions go the way they go in vLLM: out of the worker's call, past what the plugin
has put round it, into a loop that logs them and tells nobody but on the last stage. A deed happens once where
`FAKE_VLLM_FAULT_DIR` names a directory, so that a group that comes back after it stays.
"""

import os
import signal
import sys
import time
import traceback
from pathlib import Path

FAULTS = "FAKE_VLLM_FAULTS"
ONCE_DIRECTORY = "FAKE_VLLM_FAULT_DIR"
STEP_SECONDS = "FAKE_VLLM_STEP_SECONDS"
"""How long each worker computes in a step. Default 0.002."""
START_SECONDS = "FAKE_VLLM_START_SECONDS"
"""How long loading takes. Default 0."""


REFUSE_WITH = "FAKE_VLLM_REFUSE_WITH"
"""Status that the server answers every request with, as something that a person has put before it would."""
OUTLIVES = "FAKE_VLLM_OUTLIVES"
"""Set: a worker whose call has failed goes on, as vLLM's would without the plugin."""


def say(words: str) -> None:
    """Into the log, as a logger would write it."""
    sys.stderr.write(words + "\n")
    sys.stderr.flush()


def seconds(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


def fault_at(rank: int, moment: str) -> None:
    """Do what is to happen at this moment to this node's worker, if anything."""
    for fault in filter(None, os.environ.get(FAULTS, "").split(",")):
        of, when, deed = fault.split(":")
        if int(of) == rank and when == moment and _is_due(fault):
            _do(deed)


def _is_due(fault: str) -> bool:
    directory = os.environ.get(ONCE_DIRECTORY)
    if directory is None:
        return True
    try:
        (Path(directory) / fault.replace(":", "-")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _do(deed: str) -> None:
    match deed:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            while True:
                time.sleep(3600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "complain":
            say("(Worker pid=1) ERROR 11-23 08:00:00 [x.py:1] ValueError: a bad request")
        case "no-weights":
            raise ValueError("Following weights were not initialized from checkpoint: {'lm_head.weight'}")
        case "device-memory":
            raise OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which "
                "512.00 MiB is free."
            )
        case "no-cache":
            raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")
        case "no-adapter":
            raise ValueError("Call to add_lora method failed: Worker failed with error 'header too small'")
        case "raise":
            raise RuntimeError("the kernel refused")
        case _:
            raise AssertionError(f"no such deed: {deed}")


class OutOfMemoryError(RuntimeError):
    """torch's, which has no base in Python."""


OutOfMemoryError.__module__ = "torch"


def log_exception(words: str) -> None:
    """The exception that is being handled, as vLLM's logger writes it: a level, time and place before each line."""
    for line in [words, *traceback.format_exc().splitlines()]:
        say(f"(Worker pid={os.getpid()}) ERROR 11-23 08:00:00 [multiproc_executor.py:950] {line}")


def log_shutdown() -> None:
    """What follows a failure: who lost the first one, one after the other."""
    for number in range(60):
        say(f"(EngineCore pid={os.getpid()}) ERROR 11-23 08:00:00 [core.py:900] RuntimeError: shutting down, {number}")
