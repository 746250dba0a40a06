"""`UserError`: an exception with a message for the user. The command line prints it without a traceback.

Raise `UserError` for problems that a user can fix (a bad file, a port in use, a missing model). The message is one
sentence or a few lines that name the thing, its value and what to do; it never contains a secret. Any other exception
is a bug in Stageline and is reported as one.
"""

from typing import Final

USAGE_EXIT_CODE: Final = 2
"""Exit status of bad input at the command line: an unknown option, an unreadable file, a refused PipelineModel."""


class UserError(Exception):
    """An expected failure. `exit_code` is the process's exit status: 2 for bad input, or an `ExitCode` in a pod."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = int(exit_code)
