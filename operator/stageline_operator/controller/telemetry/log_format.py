"""Logs of the operator: one line each, as text for people or as JSON for collectors. Never holds a manifest."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["json", "text"]


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback of an unexpected failure."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Log to standard error, Python's warnings too, so that the program that reads the log can read them.

    Libraries speak only of trouble: kopf logs whole objects when it is asked for details.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for library in ("kopf", "kubernetes", "aiohttp", "httpx", "httpcore", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)
    # It says on each start that it leaves signals to us, as it should, and its end is said by who starts it again.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.CRITICAL)
