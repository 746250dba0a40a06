"""A status as it was recorded, read by a version that may not know all of it.

Another version of the operator may have written it, with failure classes or forms that this one lacks. What can't be
read is left out alone: a field falls back to its default, and an entry of a list goes when it is nothing without the
field. All else is kept, since a group that is not on record is replaced.
"""

import copy
from typing import Any

from pydantic import ValidationError

from stageline_api.resource.life.status import PipelineModelStatus

_Path = tuple[int | str, ...]


def read_status(recorded: Any) -> PipelineModelStatus:
    """All of a recorded status that can be read; never fails."""
    if not isinstance(recorded, dict):
        return PipelineModelStatus()
    kept = copy.deepcopy(recorded)
    while True:
        try:
            return PipelineModelStatus.model_validate(kept)
        except ValidationError as error:
            # Each round takes something out, so that there is a last one.
            _leave_out(kept, _unreadable(error))


def _unreadable(error: ValidationError) -> list[_Path]:
    """Where the parts are that can't be read; later entries of a list before earlier ones, and none within another."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # Of an entry without a field that it needs, the entry can't be read.
    found = {each["loc"][:-1] if each["type"] == "missing" else each["loc"] for each in problems}
    outermost = [path for path in found if not any(path[:length] in found for length in range(len(path)))]
    return sorted(outermost, reverse=True)


def _leave_out(status: dict[str, Any], paths: list[_Path]) -> None:
    for path in paths:
        holder: Any = status
        for step in path[:-1]:
            holder = holder[step]
        del holder[path[-1]]
