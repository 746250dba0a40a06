"""Whether an answer begins with thoughts follows from the template and the prompt it makes, as do its arguments."""

from pathlib import Path
from typing import Any

import pytest

from oracles.tokenizer_models import write_byte_level
from stageline_api.engine_http import ChatMessage, ChatPrompt, GenerateRequest, SamplingParams, TextPrompt, ThoughtStart
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.prompts import PromptReader

BODY = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
QWEN = BODY + "A:{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
DEEPSEEK = BODY + "{% if add_generation_prompt %}A:<think>\n{% else %}</think>{% endif %}"
EFFORT = BODY + "{{ reasoning_effort }}{{ style }}"


def read(directory: Path, template: str, prompt: Any = None, **sampling: Any) -> Any:
    write_byte_level(directory, chat_template=template)
    reader = PromptReader.load(directory, vocab_size=260, max_model_len=4096, eos_token_ids=[1])
    asked = prompt or chat()
    return reader.read(GenerateRequest(request_id="r", prompt=asked, sampling=SamplingParams(**sampling))), reader


def chat(**fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),), **fields)


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        (QWEN, None, ThoughtStart.TAGGED),
        (DEEPSEEK, None, ThoughtStart.OPEN),
        (DEEPSEEK, chat(add_generation_prompt=False), ThoughtStart.TAGGED),
        (BODY, None, None),
        (QWEN, TextPrompt(text="Hi"), None),
    ],
    ids=["marks", "opened", "not opened", "no marks", "no chat"],
)
def test_thoughts_follow_from_the_template(tmp_path: Path, template: str, prompt: Any, expected: Any) -> None:
    assert read(tmp_path, template, prompt)[0].thoughts == expected


SAID = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>\n{% endfor %}"
OPENS = SAID + "{% if add_generation_prompt %}<assistant><think>\n{% endif %}{# </think> #}"
OPENS_EACH = (
    SAID.replace(
        "{{ message.content }}", "{% if message.role == 'assistant' %}<think>\n{% endif %}{{ message.content }}"
    )
    + "{# </think> #}"
)
ENDS_BARE = "{% for message in messages %}{{ message.content }}\n{% endfor %}{# </think> #}"


HAS_WORDS = SAID + "{% if add_generation_prompt %}<assistant><think>\nOkay, {% endif %}{# </think> #}"
HAS_THOUGHT = SAID + "{% if add_generation_prompt %}<assistant><think>\n\n</think>\n\nSo: {% endif %}"
ALWAYS_ADDS = (
    SAID + "{% if add_generation_prompt %}<assistant>{% else %}{{ raise_exception('no') }}{% endif %}{# </think> #}"
)
ENDS_TURNS = SAID + "{% if add_generation_prompt %}<think>Hm, {% else %}<end>{% endif %}{# </think> #}"


def asked(words: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=(ChatMessage(role="user", content=words),), **fields)


def continued(words: str, asked: str = "Hi") -> ChatPrompt:
    turns = (ChatMessage(role="user", content=asked), ChatMessage(role="assistant", content=words))
    return ChatPrompt(messages=turns, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        (OPENS, continued("<think>\nOkay, so the user"), ThoughtStart.OPEN),
        (OPENS, continued("<think>" + "Hm. " * 40), ThoughtStart.OPEN),
        (OPENS, continued("<think>"), ThoughtStart.OPEN),
        (OPENS, continued("<think>x</think>\nThe answer"), ThoughtStart.TAGGED),
        (OPENS, continued("x</think> The tag <think> is"), ThoughtStart.TAGGED),
        (OPENS, continued("The answer"), ThoughtStart.TAGGED),
        (OPENS, continued("The answer", asked="<think>"), ThoughtStart.TAGGED),
        (OPENS_EACH, continued("Okay"), ThoughtStart.OPEN),
        (OPENS_EACH, continued("Okay</think>It is"), ThoughtStart.TAGGED),
        (ENDS_BARE, continued("The answer", asked="Say <think>"), ThoughtStart.TAGGED),
        (ENDS_BARE, ChatPrompt(messages=(ChatMessage(role="user", content="Say <think>"),)), ThoughtStart.TAGGED),
        (OPENS, ChatPrompt(messages=(ChatMessage(role="user", content="Say <think>"),)), ThoughtStart.OPEN),
        (OPENS, ChatPrompt(messages=(ChatMessage(role="user", content="a</think>"),)), ThoughtStart.OPEN),
        (HAS_WORDS, asked("Hi"), ThoughtStart.OPEN),
        (HAS_WORDS, asked("Say <think>"), ThoughtStart.OPEN),
        (HAS_WORDS, asked("Say <think>, a tag </think>"), ThoughtStart.OPEN),
        (HAS_WORDS, asked("Hi", add_generation_prompt=False), ThoughtStart.TAGGED),
        (HAS_WORDS, asked("Say <think> to me", add_generation_prompt=False), ThoughtStart.TAGGED),
        (HAS_WORDS, continued("The answer"), ThoughtStart.TAGGED),
        (HAS_THOUGHT, asked("Hi"), ThoughtStart.TAGGED),
        (HAS_THOUGHT, asked("Say <think> to me"), ThoughtStart.TAGGED),
        (ALWAYS_ADDS, asked("Say <think> to me"), ThoughtStart.TAGGED),
        (ENDS_TURNS, asked("Hi"), ThoughtStart.OPEN),
        (ENDS_TURNS, asked("<"), ThoughtStart.OPEN),
        (ENDS_BARE, asked("Say <think> to me"), ThoughtStart.TAGGED),
    ],
    ids=lambda value: ascii(value.messages[-1].content)[:30] if isinstance(value, ChatPrompt) else None,
)
def test_only_a_thought_of_the_assistants_own_last_turn_goes_on(
    tmp_path: Path, template: str, prompt: ChatPrompt, expected: ThoughtStart
) -> None:
    assert read(tmp_path, template, prompt)[0].thoughts == expected


def test_an_answer_that_is_held_to_something_has_no_thoughts(tmp_path: Path) -> None:
    assert read(tmp_path, DEEPSEEK, json_schema="{}")[0].thoughts is None


def text(directory: Path, template: str, prompt: ChatPrompt) -> str:
    admitted, reader = read(directory, template, prompt)
    return str(reader.detokenize(admitted.prompt_token_ids))


def test_arguments_are_variables_of_the_template(tmp_path: Path) -> None:
    assert text(tmp_path, QWEN, chat(template_arguments={"enable_thinking": False})).endswith("</think>\n\n")
    assert text(tmp_path, QWEN, chat(reasoning_effort="none")).endswith("</think>\n\n")
    told = chat(template_arguments={"style": "x"}, reasoning_effort="low")
    assert text(tmp_path, EFFORT, told).endswith("lowx")


def test_an_effort_that_the_template_can_not_tell_is_ignored_by_name(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN, chat(reasoning_effort="low"))[0].ignored == ("reasoning_effort",)
    assert read(tmp_path, QWEN, chat(reasoning_effort="none"))[0].ignored == ()
    assert read(tmp_path, EFFORT, chat(reasoning_effort="low"))[0].ignored == ()
    unread = chat(template_arguments={"style": "x", "x\r\nset-cookie": 1, "é": 2, "enable_thinking": False})
    names = ("chat_template_kwargs", "chat_template_kwargs", "chat_template_kwargs.enable_thinking")
    assert read(tmp_path, EFFORT, unread)[0].ignored == names
    assert read(tmp_path, QWEN, chat(template_arguments={"enable_thinking": False}))[0].ignored == ()


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "documents"])
def test_what_has_a_field_of_its_own_is_no_argument(tmp_path: Path, name: str) -> None:
    with pytest.raises(PromptError, match=name) as refused:
        read(tmp_path, QWEN, chat(template_arguments={name: "x"}))
    assert refused.value.param == "chat_template_kwargs"
