"""The operator's log as a collector reads it: messages, warnings of libraries and faults, each one object of JSON."""

import json
import subprocess
import sys

SPEAKS = """
import logging, warnings
from stageline_operator.controller.telemetry.log_format import configure_logging
configure_logging({log_format!r}, "info")
logging.getLogger("of.us").info("two\\nlines")
warnings.warn("a library is unhappy", RuntimeWarning)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("of.us").exception("a fault")
"""


def spoken(log_format: str) -> list[str]:
    """Lines on the standard error of a process with the operator's logging."""
    script = SPEAKS.format(log_format=log_format)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return done.stderr.splitlines()


def test_messages_warnings_and_tracebacks_are_one_json_object_each() -> None:
    lines = [json.loads(line) for line in spoken("json")]
    assert [(line["level"], line["logger"]) for line in lines] == [
        ("info", "of.us"),
        ("warning", "py.warnings"),
        ("error", "of.us"),
    ]
    assert lines[0]["message"] == "two\nlines"
    assert "RuntimeWarning: a library is unhappy" in lines[1]["message"]
    assert "ZeroDivisionError" in lines[2]["exception"]


def test_people_read_the_same_in_words() -> None:
    text = "\n".join(spoken("text"))
    for words in ("INFO of.us: two", "WARNING py.warnings: ", "ERROR of.us: a fault", "ZeroDivisionError"):
        assert words in text
