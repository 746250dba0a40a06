"""The one form of all logs: what a line of JSON holds, what text says, and levels that change while a process runs."""

import json
import subprocess
import sys

import pytest

from stageline_api.telemetry.logs import LogSettings, log_settings
from stageline_local.node.images import machine_environment

SPEAKS = """
import logging, os, signal, sys, warnings
from stageline_api.telemetry.logs import LogSettings, configure_logging, identify, lines_about, pass_line_on
configure_logging("operator", LogSettings({form!r}, {level!r}), hides_values={hides_values})
log = logging.getLogger("stageline_operator.of_us")
log.info("two\\nlines")
identify(model="of the process", group=0)
with lines_about({{"model": "of the task", "namespace": "prod"}}):
    log.info("in a pass", extra={{"request_id": "r1", "password": "hunter2", "client_request_id": None}})
log.debug("in detail")
log.warning({{"message": "not a template"}})
logging.getLogger("a.library").info("chatter")
warnings.warn("a library is unhappy", RuntimeWarning)
try:
    {{}}["what a client wrote"]
except KeyError:
    log.exception("a fault")
pass_line_on(log, b"said by a child\\n")
for number in (signal.SIGUSR1, signal.SIGUSR2):
    os.kill(os.getpid(), number)
    log.debug("after %s", signal.Signals(number).name)
    logging.getLogger("a.library").debug("more chatter")
"""


def spoken(form: str, level: str = "info", *, hides_values: bool = False) -> list[str]:
    """Lines on the standard error of a process with our logging."""
    script = SPEAKS.format(form=form, level=level, hides_values=hides_values)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return done.stderr.splitlines()


@pytest.mark.parametrize("form", ["json", "auto"])
def test_messages_warnings_and_tracebacks_are_one_json_object_each(form: str) -> None:
    lines = [json.loads(line) for line in spoken(form)]
    assert [(line["level"], line["message"].splitlines()[0].rpartition(": ")[2]) for line in lines] == [
        ("info", "two"),
        ("info", "in a pass"),
        ("warning", "'not a template'}"),
        ("warning", "a library is unhappy"),
        ("error", "a fault"),
        ("info", "said by a child"),
        ("warning", "the log level is now debug"),
        ("debug", "after SIGUSR1"),
        ("warning", "the log level is now info"),
    ]
    assert {line["component"] for line in lines} == {"operator"}
    assert lines[0]["message"] == "two\nlines"
    assert list(lines[0]) == ["time", "level", "component", "logger", "message"]
    assert "KeyError: 'what a client wrote'" in lines[4]["exception"]


def test_a_line_names_its_process_its_task_and_its_request_and_nothing_that_is_not_known() -> None:
    lines = [json.loads(line) for line in spoken("json")]
    names = ("namespace", "model", "group", "request_id", "client_request_id", "password")
    assert {name: lines[1][name] for name in names if name in lines[1]} == {
        "namespace": "prod",
        "model": "of the task",
        "group": 0,
        "request_id": "r1",
    }
    assert (lines[5]["model"], "namespace" in lines[5]) == ("of the process", False), "the task is over"
    assert "hunter2" not in "".join(spoken("json") + spoken("text")), "fields that nobody declared"


def test_people_read_the_same_in_words() -> None:
    text = "\n".join(spoken("text"))
    for words in (
        "INFO stageline_operator.of_us two",
        "in a pass namespace='prod' model='of the task' request_id='r1'",
        "WARNING py.warnings ",
        "ERROR stageline_operator.of_us a fault",
        "KeyError: 'what a client wrote'",
        "\nsaid by a child\n",
        "DEBUG stageline_operator.of_us after SIGUSR1",
    ):
        assert words in text, text
    assert "chatter" not in text


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_process_that_holds_prompts_writes_errors_without_their_texts(form: str) -> None:
    text = "\n".join(spoken(form, hides_values=True))
    assert "builtins.KeyError (its text is left out)" in text
    assert "what a client wrote" not in text


def test_each_level_leaves_out_what_is_below_it() -> None:
    def first(level: str) -> list[str]:
        return [json.loads(line)["level"] for line in spoken("json", level)][:3]

    assert first("debug") == ["info", "info", "debug"]
    assert first("warning") == ["warning", "warning", "error"]
    assert first("error") == ["error", "warning", "debug"], "a change of the level itself is always said"


def test_settings_name_the_variable_that_is_wrong() -> None:
    assert log_settings({}) == LogSettings("auto", "info")
    with pytest.raises(ValueError, match=r"STAGELINE_LOG_LEVEL='loud' is none of debug, info, warning, error"):
        log_settings({"STAGELINE_LOG_LEVEL": "loud"})
    with pytest.raises(ValueError, match=r"STAGELINE_LOG_FORMAT='xml' is none of auto, json, text"):
        log_settings({"STAGELINE_LOG_FORMAT": "xml"})


def test_processes_of_one_machine_write_text_unless_a_person_wants_otherwise() -> None:
    assert machine_environment({})["STAGELINE_LOG_FORMAT"] == "text"
    assert machine_environment({"STAGELINE_LOG_FORMAT": "json"})["STAGELINE_LOG_FORMAT"] == "json"
    assert machine_environment({"STAGELINE_LOG_LEVEL": "debug"})["STAGELINE_LOG_LEVEL"] == "debug"
