"""Logs errors that reach the event loop and that nobody waits for: their kind and place, never what is in them."""

import asyncio
import logging
from typing import Any, Final

_CALLBACK: Final = "Exception in callback"

logger = logging.getLogger(__name__)


def log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's exception handler. Its own would write the arguments of callbacks and the texts of errors."""
    message = str(context.get("message", ""))
    error = context.get("exception")
    shown = _CALLBACK if message.startswith(_CALLBACK) else message
    logger.error("an error that nobody waits for: %s", shown, exc_info=error if error is not None else False)
