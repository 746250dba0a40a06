"""Why a model could not be prepared, as a sentence for the author of its spec.

An error that may not recur (an unreachable index, a broken transfer, a full disk) is a `PrepareError` and is retried.
An error that persists until the spec changes is a `BadConfigError` and is never retried.
"""

import errno
from typing import Final

from stageline_api.errors import UserError
from stageline_api.failures import ExitCode

WITHOUT_THE_NETWORK: Final = (
    "where pods have no way there, fill a claim elsewhere and name it as pvc://CLAIM/DIRECTORY "
    '("Without the internet" in docs/quickstart-cluster.md)'
)
"""Advice about an unreachable source, for a cluster that can never reach it."""


class PrepareError(UserError):
    """The model can't be fetched, converted or stored. Ends the process with `ExitCode.MODEL_LOAD`."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.MODEL_LOAD) -> None:
        super().__init__(message, exit_code)


class BadConfigError(PrepareError):
    """What was asked can't be had, however often it is tried. Ends the process with `ExitCode.BAD_CONFIG`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.BAD_CONFIG)


def storage_error(error: OSError, action: str) -> PrepareError:
    """Say in a sentence what the file system refused. `action` reads after "cannot", e.g. "write the model cache"."""
    where = f" at {error.filename}" if error.filename else ""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            hint = "the disk is full; free some space or choose another cache directory"
        case errno.EACCES | errno.EPERM:
            hint = "permission denied; make it writable for this user or choose another cache directory"
        case errno.EROFS:
            hint = "the file system is read-only; choose another cache directory"
        case errno.ENOENT:
            hint = "it does not exist"
        case errno.ENOTDIR | errno.EEXIST:
            hint = "a part of the path is not a directory"
        case _:
            hint = error.strerror or str(error)
    return PrepareError(f"cannot {action}{where}: {hint}")
