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


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "documents"])
def test_what_has_a_field_of_its_own_is_no_argument(tmp_path: Path, name: str) -> None:
    with pytest.raises(PromptError, match=name) as refused:
        read(tmp_path, QWEN, chat(template_arguments={name: "x"}))
    assert refused.value.param == "chat_template_kwargs"
