"""Reads a recorded status that this version may not know completely.

Another version of the operator may have written it, with failure classes or formats that this version lacks. Only
unreadable parts are dropped: a field falls back to its default, and a list entry that needs the field is removed.
Everything else is kept, because a group without a record is replaced.
"""

import copy
from typing import Any

from pydantic import ValidationError

from stageline_api.resource.life.status import PipelineModelStatus

_Path = tuple[int | str, ...]


def read_status(recorded: Any) -> PipelineModelStatus:
    """The readable part of a recorded status; never fails."""
    if not isinstance(recorded, dict):
        return PipelineModelStatus()
    kept = copy.deepcopy(recorded)
    while True:
        try:
            return PipelineModelStatus.model_validate(kept)
        except ValidationError as error:
            # Each round removes something, so the loop ends.
            _leave_out(kept, _unreadable(error))


def _unreadable(error: ValidationError) -> list[_Path]:
    """Paths of unreadable parts; later entries of a list before earlier ones, and no path within another."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # An entry that lacks a required field is unreadable as a whole.
    found = {each["loc"][:-1] if each["type"] == "missing" else each["loc"] for each in problems}
    outermost = [path for path in found if not any(path[:length] in found for length in range(len(path)))]
    return sorted(outermost, reverse=True)


def _leave_out(status: dict[str, Any], paths: list[_Path]) -> None:
    for path in paths:
        holder: Any = status
        for step in path[:-1]:
            holder = holder[step]
        del holder[path[-1]]
