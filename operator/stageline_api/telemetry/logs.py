"""The log of every component: on standard error, in one form, at a level that can be changed while it runs.

SIGUSR1 makes a process speak in detail (`debug`), SIGUSR2 sets it back to the level that it was started with. Only who
may signal the process can do that, so there is no door to guard, and it is the same in gateway, engine, stage and
operator. Libraries speak only of trouble, at every level: in detail they would write headers and whole objects.
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
    """What the environment asks for; raises ValueError, naming the variable and its value."""
    return LogSettings(environ.get(env.LOG_FORMAT) or "auto", environ.get(env.LOG_LEVEL) or "info")


def configure_logging(component: str, settings: LogSettings, *, hides_values: bool = False) -> None:
    """Log to standard error from here on, warnings of Python too. To be called on the main thread.

    `hides_values` is for processes that hold what clients write: tracebacks then have types and places, no texts.
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
        _log.warning("the log level is %s from here on", level)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, change)


def identify(**known: str | int) -> None:
    """Who this process is, once it knows: fields for every later line of JSON."""
    _identity.update(known)


@contextmanager
def lines_about(fields: Fields) -> Iterator[None]:
    """Every line of this task within the block is about `fields`, as far as it says nothing else."""
    token = around.set({**around.get(), **fields})
    try:
        yield
    finally:
        around.reset(token)


def pass_line_on(logger: logging.Logger, line: bytes) -> None:
    """A line of another program's log: as it is where lines are text, in an object of its own where they are JSON."""
    if any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers):
        logger.info("%s", line.decode(errors="replace").rstrip("\r\n"))
    else:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def _set_level(level: str) -> None:
    """Of our own loggers; libraries stay at warnings, or at errors where only those are asked for."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(number, logging.WARNING))
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(number)
