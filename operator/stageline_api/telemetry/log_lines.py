"""The format of a log line: one JSON object for collectors, or a line of text for people, with the same content.

JSON has `time`, `level`, `component`, `logger` and `message`, then the known CONTEXT_FIELDS and, after an unexpected
error, `exception`. No other field is written, even if a library attaches more to its records.
"""

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import Any, Final

from pythonjsonlogger.json import JsonFormatter

CONTEXT_FIELDS: Final = (
    "namespace", "model", "group", "incarnation", "stage", "rank", "request_id", "client_request_id",
)  # fmt: skip
"""Origin or subject of a line. `model` is the PipelineModel's name. `request_id` is Stageline's own, the same in
gateway and engine; `client_request_id` is the client's `X-Request-Id`.
"""

Fields = Mapping[str, str | int]
ErrorInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

around: Final[ContextVar[Fields]] = ContextVar("around", default=MappingProxyType({}))
"""Context fields for the lines of the current task."""


class JsonLines(JsonFormatter):
    """`identity` is added to every line; `hides_values` omits error messages, which may quote input."""

    def __init__(self, identity: Fields, *, hides_values: bool) -> None:
        super().__init__(json_ensure_ascii=False)
        self._identity = identity
        self._hides_values = hides_values

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """The fields of one line, in reading order."""
        log_data["time"] = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        log_data["level"] = record.levelname.lower()
        log_data["component"] = self._identity["component"]
        log_data["logger"] = record.name
        log_data["message"] = record.getMessage()
        log_data.update(fields_of(record, self._identity))
        if exception := message_dict.get("exc_info"):
            log_data["exception"] = exception

    def formatException(self, ei: ErrorInfo) -> str:  # noqa: N802 - logging's name
        return without_texts(ei) if self._hides_values else logging.Formatter.formatException(self, ei)


class TextLines(logging.Formatter):
    """For people. Context fields are at the end of a line; the file's name identifies the process."""

    def __init__(self, *, hides_values: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._hides_values = hides_values

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        about = "".join(f" {name}={value!r}" for name, value in fields_of(record, {}).items())
        return super().formatMessage(record) + about

    def formatException(self, ei: ErrorInfo) -> str:  # noqa: N802 - logging's name
        return without_texts(ei) if self._hides_values else super().formatException(ei)


def fields_of(record: logging.LogRecord, identity: Fields) -> dict[str, str | int]:
    """Context fields of one line: its own, else those of its task, else those of its process."""
    known = {**identity, **around.get(), **record.__dict__}
    return {name: known[name] for name in CONTEXT_FIELDS if known.get(name) is not None}


def without_texts(ei: ErrorInfo) -> str:
    """A traceback with types and places only: an error message can quote input, such as a line of a prompt."""
    return "" if ei[1] is None else "\n".join(_without_texts(ei[1], set()))


def _without_texts(error: BaseException, seen: set[int]) -> Iterator[str]:
    """The earliest error first, as in Python's own tracebacks."""
    seen.add(id(error))
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None and id(earlier) not in seen:
        yield from _without_texts(earlier, seen)
        yield "which led to"
    yield f"{type(error).__module__}.{type(error).__qualname__} (its text is left out)"
    for frame, line in traceback.walk_tb(error.__traceback__):
        yield f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
    for one in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        if id(one) not in seen:
            yield "one of them"
            yield from _without_texts(one, seen)
