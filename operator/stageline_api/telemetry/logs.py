"""Logging of every component: on standard error, in one format, at a level that can be changed at runtime.

SIGUSR1 sets a process to `debug`, SIGUSR2 restores its initial level. Only users that may signal the process can do
that, so it needs no access control, and it is the same in gateway, engine, stage and operator. Libraries log only
warnings and errors at every level: in detail they would log headers and whole objects.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

from stageline_api import env
from stageline_api.telemetry.log_lines import Fields, JsonLines, TextLines, around

FORMATS: Final = ("auto", "json", "text")
LEVELS: Final = ("debug", "info", "warning", "error")
OWN_PACKAGES: Final = (
    "stageline_api",
    "stageline_cli",
    "stageline_gateway",
    "stageline_kubernetes",
    "stageline_local",
    "stageline_operator",
    "stageline_runtime",
    "stageline_vllm",
)

_log = logging.getLogger(__name__)
_identity: dict[str, str | int] = {}


@dataclass(frozen=True, slots=True)
class LogSettings:
    """`auto` is text on a terminal and JSON elsewhere."""

    form: str = "auto"
    level: str = "info"

    def __post_init__(self) -> None:
        for name, value, known in ((env.LOG_FORMAT, self.form, FORMATS), (env.LOG_LEVEL, self.level, LEVELS)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")

    @property
    def is_json(self) -> bool:
        return self.form == "json" or (self.form == "auto" and not sys.stderr.isatty())


def log_settings(environ: Mapping[str, str] = os.environ) -> LogSettings:
    """The settings in the environment; raises ValueError with the variable and its value."""
    return LogSettings(environ.get(env.LOG_FORMAT) or "auto", environ.get(env.LOG_LEVEL) or "info")


def configure_logging(component: str, settings: LogSettings, *, hides_values: bool = False) -> None:
    """Log to standard error from now on, Python's warnings too. Call it on the main thread.

    `hides_values` is for processes with client content: tracebacks then have types and places, no messages.
    """
    _identity.clear()
    identify(component=component)
    handler = logging.StreamHandler(sys.stderr)
    lines = (
        JsonLines(_identity, hides_values=hides_values) if settings.is_json else TextLines(hides_values=hides_values)
    )
    handler.setFormatter(lines)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    _set_level(settings.level)

    def change(number: int, _frame: FrameType | None) -> None:
        level = "debug" if number == signal.SIGUSR1 else settings.level
        _set_level(level)
        _log.warning("the log level is now %s", level)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, change)


def identify(**known: str | int) -> None:
    """Identity of this process, once it is known: fields for every later line of JSON."""
    _identity.update(known)


@contextmanager
def lines_about(fields: Fields) -> Iterator[None]:
    """Add `fields` to every line of this task within the block, unless the line sets them itself."""
    token = around.set({**around.get(), **fields})
    try:
        yield
    finally:
        around.reset(token)


def pass_line_on(logger: logging.Logger, line: bytes) -> None:
    """Log a line of another program: unchanged as text, or wrapped in a JSON object."""
    if any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers):
        logger.info("%s", line.decode(errors="replace").rstrip("\r\n"))
    else:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def _set_level(level: str) -> None:
    """Set the level of our own loggers; libraries stay at warnings, or at errors if only those are asked for."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(number, logging.WARNING))
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(number)
