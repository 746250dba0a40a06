"""What becomes of an exception that leaves a call of a vLLM worker: it is published, logged, and ends the process.

vLLM drops the exceptions of all ranks but one, its output rank: `execute_model` raises, nobody is told, and the
`sample_tokens` after it returns as if there had been no step. The next step's hidden states would then be the first to
reach the stage behind, which takes them for those it waits for: answers go on with wrong tokens. The next call follows
within milliseconds, so a look from outside comes too late, and the worker ends here, before it can send anything more.
What it has sent before is right and may arrive or not; its peers lose the connection, its node and its supervisor learn
of the end at once from the kernel.

Nothing is lost by that. On the output rank the same exception ends vLLM's engine, and while a model is loaded or warmed
up it ends the start, so on no rank does a worker outlive one. Python's own way out is not taken: on it the worker waits
for peers (`destroy_process_group`), and those for it.
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
        """Round a call of the worker. SIGTERM's SystemExit is no exception of it, and goes on."""
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
    """With the place of one that says nothing, as a bare `assert` does."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or f'in {place.name} ({Path(place.filename).name}:{place.lineno})'}"
