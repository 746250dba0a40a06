"""Last words: how an engine or a stage ends so that whoever finds the body knows why.

The message goes to the termination path first and the log second; then the process exits with the code of its class.
"""

import logging
import os
from pathlib import Path

from stageline_api import env
from stageline_api.failures import EXIT_CODE_OF_CLASS, ExitCode, FailureClass, TerminationMessage

logger = logging.getLogger(__name__)


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
    ) -> None:
        super().__init__(detail)
        self.failure_class = failure_class
        self.detail = detail
        self.operation = operation
        self.step = step
        self.peer = peer

    def message(self, stage: int | None) -> TerminationMessage:
        """The termination message of this failure as told by `stage` (None: the engine)."""
        return TerminationMessage(
            failure_class=self.failure_class,
            stage=stage,
            step=self.step,
            operation=self.operation,
            peer=self.peer,
            detail=self.detail,
        )


def write_last_words(message: TerminationMessage) -> ExitCode:
    """Write the message to the termination path (when the contract names one) and return the exit code."""
    path = os.environ.get(env.TERMINATION_PATH)
    if path:
        try:
            Path(path).write_text(message.model_dump_json(), encoding="utf-8")
        except OSError as error:
            logger.error("can't write the termination message to %s: %s", path, error)
    place = "engine" if message.stage is None else f"stage {message.stage}"
    logger.error("%s ends: %s: %s", place, message.failure_class, message.detail)
    return EXIT_CODE_OF_CLASS.get(message.failure_class, ExitCode.INTERNAL)
