"""System turns reach the model, also where its template refuses them, at their place or everywhere."""

from pathlib import Path

import pytest
from msgspec import structs

from oracles.tokenizer_models import write_byte_level
from stageline_api.engine_http import ChatMessage, ChatPrompt, GenerateRequest, SamplingParams, ToolCall
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.chat_template import ChatTemplate
from stageline_runtime.engine.text.prompts import PromptReader

SAID = "[{{ message.role }}]{{ message.content }}"
FIRST_ALONE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + SAID + "{% endfor %}"
)
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}[system]{{ messages[0].content }}"
    "{% else %}{% set turns = messages %}{% endif %}{% for message in turns %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if message.role == 'system' %}{{ raise_exception('only user and assistant') }}{% endif %}"
    + SAID
    + "{% endfor %}"
)
TAKES_ALL = "{% for message in messages %}" + SAID + "{% endfor %}"
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + SAID
    + "{% endfor %}"
)
ALTERNATES_ALONE = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}" + SAID + "{% endfor %}"
)
PASSES_OVER = (
    "{% for message in messages %}{% if message.role in ('user', 'assistant') %}" + SAID + "{% endif %}{% endfor %}"
)
NEEDS_OBJECTS = FIRST_ALONE.replace(
    SAID,
    SAID + "{% for call in message.tool_calls or [] %}{% for name in call.function.arguments.keys() %}"
    "<{{ name }}>{% endfor %}{% endfor %}",
)


def chat(*turns: str) -> list[ChatMessage]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [ChatMessage(role=roles[turn[0]], content=turn) for turn in turns]


@pytest.mark.parametrize("template", [FIRST_ALONE, ALTERNATES])
@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (["u1", "s1"], "[user]u1\n\ns1"),
        (["s1", "u1", "s2"], "[system]s1[user]u1\n\ns2"),
        (["s1", "s2", "u1"], "[system]s1\n\ns2[user]u1"),
        (["u1", "s1", "u2"], "[user]u1\n\ns1\n\nu2"),
        (["s1", "u1", "a1", "s2", "u2"], "[system]s1[user]u1[assistant]a1[user]s2\n\nu2"),
        (["s1", "u1", "a1", "s2"], "[system]s1[user]u1[assistant]a1[user]s2"),
        (["u1", "s1", "s2", "a1", "u2"], "[user]u1\n\ns1\n\ns2[assistant]a1[user]u2"),
    ],
    ids=" ".join,
)
def test_late_system_turns_go_to_the_users_turn(template: str, turns: list[str], text: str) -> None:
    assert ChatTemplate(template, {}).render(chat(*turns)) == text


def test_a_template_that_takes_them_gets_them_as_they_are() -> None:
    assert ChatTemplate(TAKES_ALL, {}).render(chat("u1", "s1", "u2")) == "[user]u1[system]s1[user]u2"


def test_their_words_are_not_lost_to_a_template_that_passes_them_over() -> None:
    template = ChatTemplate(
        "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}{% for message in messages %}"
        "{% if message.role in ('user', 'assistant') %}" + SAID + "{% endif %}{% endfor %}",
        {},
    )
    assert template.render(chat("s1", "u1", "a1", "s2")) == "[system]s1[user]u1[assistant]a1[user]s2"
    assert template.render(chat("s1", "s2", "u1")) == "[system]s1\n\ns2[user]u1"
    assert template.render(chat("s1", "u1", "a1")) == "[system]s1[user]u1[assistant]a1"


def test_a_template_that_writes_other_blanks_shows_them() -> None:
    template = ChatTemplate(
        "{% for message in messages %}[{{ message.role }}]{{ message.content | replace('\\n', ' ') }}{% endfor %}", {}
    )
    assert template.render(chat("u1", "s1\nof two lines")) == "[user]u1[system]s1 of two lines"


@pytest.mark.parametrize("template", [NO_SYSTEM, ALTERNATES_ALONE])
@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (["s1", "u1"], "[user]s1\n\nu1"),
        (["s1"], "[user]s1"),
        (["s1", "s2", "u1", "a1", "u2"], "[user]s1\n\ns2\n\nu1[assistant]a1[user]u2"),
        (["s1", "u1", "a1", "s2"], "[user]s1\n\nu1[assistant]a1[user]s2"),
        (["u1", "a1", "u2"], "[user]u1[assistant]a1[user]u2"),
    ],
    ids=" ".join,
)
def test_a_template_without_system_turns_has_their_words_in_the_users_first(
    template: str, turns: list[str], text: str
) -> None:
    assert ChatTemplate(template, {}).render(chat(*turns)) == text


def test_a_first_system_turn_that_the_template_passes_over_is_named(tmp_path: Path) -> None:
    switched = TAKES_ALL.replace("message.content", "message.content | replace('/no_think', '')")
    for template, named in ((PASSES_OVER, ("messages[system]",)), (TAKES_ALL, ()), (NO_SYSTEM, ()), (switched, ())):
        directory = write_byte_level(tmp_path, chat_template=template)
        reader = PromptReader.load(directory, vocab_size=260, max_model_len=4096, eos_token_ids=[1])
        for turns, ignored in ((chat("s1", "u1"), named), (chat("u1"), ())):
            prompt = ChatPrompt(messages=(structs.replace(turns[0], content="/no_think"), *turns[1:]))
            asked = GenerateRequest(request_id="r", prompt=prompt, sampling=SamplingParams(seed=1))
            assert reader.read(asked).ignored == ignored, (template, turns)


def test_what_folding_does_not_mend_is_refused_for_what_was_sent() -> None:
    for template, turns, reason in (
        (ALTERNATES, ["u1", "a1", "a2", "s1"], "must alternate"),
        (NO_SYSTEM.replace("'system'", "'assistant'"), ["s1", "u1", "a1"], "no system"),
        (ALTERNATES, ["u1", "u2"], "must alternate"),
        (ALTERNATES, ["s1", "u1", "u2"], "must alternate"),
    ):
        with pytest.raises(PromptError, match=reason):
            ChatTemplate(template, {}).render(chat(*turns))


def test_calls_are_still_written_in_the_form_that_the_template_takes() -> None:
    asked, system = chat("u1", "s1")
    call = ToolCall(id="c", name="f", arguments='{"town": "Os')
    called = ChatMessage(role="assistant", content="", tool_calls=(call,))
    text = ChatTemplate(NEEDS_OBJECTS, {}).render([asked, called, system])
    assert text == "[user]u1[assistant]<town>[user]s1"


def test_an_answer_that_continues_is_folded_alike() -> None:
    text = ChatTemplate(ALTERNATES, {}).render_to_continue(chat("u1", "s1", "a1"))
    assert text == "[user]u1\n\ns1[assistant]a1"
