"""How an engine or a stage ends: a termination message and an exit code that tell the cause to the operator.

The message goes to the termination path first and the log second; then the process exits with the code of its class.
"""

import logging
import os
import threading
from pathlib import Path

from stageline_api import env
from stageline_api.failures import EXIT_CODE_OF_CLASS, ExitCode, FailureClass, TerminationMessage, place_of

logger = logging.getLogger(__name__)

_one_at_a_time = threading.Lock()
_first_words: dict[str, TerminationMessage] = {}
"""What has been written, by path. A watchdog and the thread it watches may both find that this process must end."""


class RuntimeFailure(Exception):  # noqa: N818 - it is a failure, told by its class
    """A reason to end the process: class, operation and peer as the termination message will carry them."""

    def __init__(
        self,
        failure_class: FailureClass,
        detail: str,
        *,
        operation: str = "",
        step: int | None = None,
        peer: int | None = None,
        rank: int | None = None,
    ) -> None:
        """`rank` is the rank of this stage that failed, where it is not the one that tells."""
        super().__init__(detail)
        self.failure_class = failure_class
        self.detail = detail
        self.operation = operation
        self.step = step
        self.peer = peer
        self.rank = rank

    def message(self, stage: int | None) -> TerminationMessage:
        return TerminationMessage(
            failure_class=self.failure_class,
            stage=stage,
            rank=self.rank,
            step=self.step,
            operation=self.operation,
            peer=self.peer,
            detail=self.detail,
        )


def write_last_words(message: TerminationMessage) -> ExitCode:
    """Write the message to the termination path (when the contract names one) and return the exit code.

    The first message of a process counts: a later one is logged, and gets the exit code of the first.
    """
    path = os.environ.get(env.TERMINATION_PATH)
    told = _write_once(path, message) if path else message
    place = place_of(message.stage, message.rank)
    logger.error("%s ends: %s: %s", place, message.failure_class, message.detail)
    return _exit_code(told)


def pass_last_words_on(message: TerminationMessage) -> ExitCode:
    """Write another process's termination message, or a message about it, which may be that it drained."""
    if message.failure_class is not FailureClass.EVICTED:
        return write_last_words(message)
    path = os.environ.get(env.TERMINATION_PATH)
    logger.info("drained: %s", message.detail)
    return _exit_code(_write_once(path, message) if path else message)


def write_drained(stage: int | None, asked_by: str) -> ExitCode:
    """Write that `stage` (None: the engine) ends on request: an exit status of 0 alone doesn't show that.

    If a failure was written before, the exit code is the failure's, as `write_last_words` guarantees.
    """
    path, detail = os.environ.get(env.TERMINATION_PATH), f"told to drain by {asked_by}"
    message = TerminationMessage(failure_class=FailureClass.EVICTED, stage=stage, operation="drain", detail=detail)
    told = _write_once(path, message) if path else message
    logger.info("drained: %s", detail)
    return _exit_code(told)


def _exit_code(told: TerminationMessage) -> ExitCode:
    if told.failure_class is FailureClass.EVICTED:
        return ExitCode.DRAINED
    return EXIT_CODE_OF_CLASS.get(told.failure_class, ExitCode.INTERNAL)


def _write_once(path: str, message: TerminationMessage) -> TerminationMessage:
    with _one_at_a_time:
        if path not in _first_words:
            _first_words[path] = message
            try:
                Path(path).write_text(message.model_dump_json(), encoding="utf-8")
            except OSError as error:
                logger.error("can't write the termination message to %s: %s", path, error)
        return _first_words[path]
