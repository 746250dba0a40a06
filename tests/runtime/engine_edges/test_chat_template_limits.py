"""A template that fails, refuses, escapes or never ends costs its own request an error and nothing else."""

import threading
import time

import pytest

from stageline_api.engine_http import ChatMessage, ErrorCode
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.chat_template import ChatTemplate

MESSAGES = (ChatMessage(role="user", content="hello"),)
SILENT_LOOP = (
    "{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("{{ raise_exception('System role not supported') }}", "System role not supported", id="refuses"),
        pytest.param("{{ messages[3].content.strip() }}", "chat template", id="undefined"),
        pytest.param("{{ messages + 1 }}", "fails on these messages", id="type-error"),
        pytest.param("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails on these messages", id="recursion"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="escape"),
        pytest.param("{{ messages.append(1) }}", "unsafe", id="mutation"),
        pytest.param("{% for a in range(1000000) %}{% endfor %}", "Range too big", id="range"),
    ],
)
def test_failures_become_a_refusal_with_the_templates_words(source: str, words: str) -> None:
    with pytest.raises(PromptError, match=words) as caught:
        ChatTemplate(source, {}, limit_seconds=60).render(MESSAGES)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_VALUE, "messages")


def test_output_is_bounded() -> None:
    source = "{% for a in range(9000) %}{{ 'x' * 100 }}{% endfor %}"
    template = ChatTemplate(source, {}, max_characters=10_000, limit_seconds=60)
    with pytest.raises(PromptError, match="more than 10000 characters"):
        template.render(MESSAGES)


def test_an_endless_template_is_stopped_and_its_thread_ends() -> None:
    with pytest.raises(PromptError, match=r"took more than 0\.2 s of CPU time"):
        ChatTemplate(SILENT_LOOP, {}, limit_seconds=0.2).render(MESSAGES)
    deadline = time.monotonic() + 60
    while alive := [thread for thread in threading.enumerate() if thread.name == "time-limited"]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.01)


def test_a_template_that_waits_for_a_busy_machine_is_not_stopped() -> None:
    class Late(str):
        def __str__(self) -> str:
            threading.Event().wait(1.0)
            return "late"

    assert ChatTemplate("{{ name }}", {}, limit_seconds=0.3).render(MESSAGES, arguments={"name": Late()}) == "late"


def test_a_template_cannot_change_the_request() -> None:
    source = "{% set _ = messages[0].update({'content': 'changed'}) %}{{ messages[0].content }}"
    with pytest.raises(PromptError):
        ChatTemplate(source, {}).render(MESSAGES)
    assert MESSAGES[0].content == "hello"
