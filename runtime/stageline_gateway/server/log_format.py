"""How the gateway logs what went wrong inside it: the kind of each error and where it rose, never what is in it.

An error's text can quote what it met, a line of a prompt for instance, and a traceback ends with that text. So only
types and frames are written, also for errors that reach the event loop and that nobody waits for.
"""

import asyncio
import logging
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

LINE_FORM: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
_CALLBACK: Final = "Exception in callback"

logger = logging.getLogger(__name__)


class ValuelessFormatter(logging.Formatter):
    """Writes tracebacks without the errors' texts and without lines of source."""

    def formatException(  # noqa: N802 - logging's name
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
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


def configure_logging(access_log: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(ValuelessFormatter(LINE_FORM))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx", "httpcore", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access_log else logging.WARNING)


def log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's exception handler. Its own would write the arguments of callbacks and the texts of errors."""
    message = str(context.get("message", ""))
    error = context.get("exception")
    shown = _CALLBACK if message.startswith(_CALLBACK) else message
    logger.error("an error that nobody waits for: %s", shown, exc_info=error if error is not None else False)
