"""Handles an exception that leaves a call of a vLLM worker: it is published and logged, and ends the process.

vLLM drops the exceptions of all ranks except its output rank: `execute_model` raises unnoticed, and the
`sample_tokens` after it returns as if there had been no step. The next step's hidden states would then be the first
to reach the next stage, which takes them for those it waits for, and answers continue with wrong tokens. The next
call follows within milliseconds, too soon for a check from outside, so the worker exits here before it sends more
data. The data that it sent before is correct whether or not it arrives. Its peers lose the connection; the kernel
notifies its node and its supervisor of the exit at once.

Exiting loses nothing. On the output rank the same exception ends vLLM's engine, and during loading or warm-up it
ends the start, so no worker outlives one on any rank. The worker does not exit through Python's normal shutdown:
there it waits for peers (`destroy_process_group`), and they for it.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from stageline_vllm.worker_clock import WorkerClock

FAILED_STATUS: Final = 1
"""Exit status of a worker that ends here."""


class LastWords:
    def __init__(self, clock: WorkerClock, end_process: Callable[[int], object] = os._exit) -> None:
        self._clock = clock
        self._end_process = end_process

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Wraps a call of the worker. SIGTERM's SystemExit is not an `Exception` and propagates."""
        try:
            yield
        except Exception as error:
            self._clock.fail(_words(error))
            try:
                traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                self._end_process(FAILED_STATUS)
            raise


def _words(error: Exception) -> str:
    """Includes the location of an exception without a message, such as a bare `assert`."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or f'in {place.name} ({Path(place.filename).name}:{place.lineno})'}"
