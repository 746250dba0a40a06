"""What leaves the prompt reader fits the model; what doesn't is refused with the field, the value and the rule."""

from pathlib import Path
from typing import Any

import pytest

from oracles.tokenizer_models import write_byte_level
from stageline_api.engine_http import (
    ChatMessage,
    ChatPrompt,
    ErrorCode,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.plan_bus.messages import RequestSampling

MAX_MODEL_LEN = 16
VOCAB_SIZE = 260
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def reader(tmp_path: Path) -> PromptReader:
    write_byte_level(tmp_path, chat_template=TEMPLATE)
    return PromptReader.load(tmp_path, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=[1, 3])


def chat(content: str) -> ChatPrompt:
    return ChatPrompt(messages=(ChatMessage(role="user", content=content),))


def request(prompt: Prompt, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt=prompt, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "param", "words"),
    [
        pytest.param(chat(""), {}, ErrorCode.INVALID_VALUE, "messages", "empty", id="empty-chat"),
        pytest.param(TextPrompt(text=""), {}, ErrorCode.INVALID_VALUE, "prompt", "empty", id="empty-text"),
        pytest.param(
            TokenPrompt(token_ids=(5, 260)), {}, ErrorCode.INVALID_VALUE, "prompt", "id 260 .* 0 to 259", id="id-above"
        ),
        pytest.param(TokenPrompt(token_ids=(-1,)), {}, ErrorCode.INVALID_VALUE, "prompt", "id -1 ", id="id-below"),
        pytest.param(
            TextPrompt(text="x"),
            {"stop_token_ids": (999,)},
            ErrorCode.INVALID_VALUE,
            "stop_token_ids",
            "id 999 ",
            id="stop-id",
        ),
        pytest.param(
            TextPrompt(text="x"), {"stop": ("a", "")}, ErrorCode.INVALID_VALUE, "stop", "empty", id="empty-stop"
        ),
        pytest.param(
            TextPrompt(text="x"),
            {"stop": ("a", "b" * 257)},
            ErrorCode.INVALID_VALUE,
            "stop",
            "257 characters; at most 256",
            id="long-stop",
        ),
        pytest.param(
            TextPrompt(text="x" * 16),
            {},
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            "prompt",
            "16 tokens.*most 15",
            id="long-text",
        ),
        pytest.param(
            chat("x" * 20), {}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "messages", "20 tokens.*most 15", id="long-chat"
        ),
        pytest.param(
            TextPrompt(text="x" * 10),
            {"max_tokens": 7},
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            "max_tokens",
            "10 tokens.*7.*17.*16 tokens.*to 6",
            id="long-answer",
        ),
        pytest.param(TextPrompt(text="a\udc00"), {}, ErrorCode.INVALID_VALUE, "prompt", "DC00", id="surrogate-text"),
        pytest.param(chat("\ud800"), {}, ErrorCode.INVALID_VALUE, "messages", "D800", id="surrogate-chat"),
        pytest.param(
            TextPrompt(text="a"), {"stop": ("\ud800",)}, ErrorCode.INVALID_VALUE, "stop", "D800", id="surrogate-stop"
        ),
    ],
)
def test_refusals(
    reader: PromptReader, prompt: Prompt, sampling: dict[str, Any], code: ErrorCode, param: str, words: str
) -> None:
    with pytest.raises(PromptError, match=words) as caught:
        reader.read(request(prompt, **sampling))
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.http_status == 400


def test_ids_above_the_models_embedding_are_refused_even_when_the_tokenizer_makes_them(tmp_path: Path) -> None:
    write_byte_level(tmp_path, (b"zz",))
    reader = PromptReader.load(tmp_path, vocab_size=100, max_model_len=16, eos_token_ids=[])
    with pytest.raises(PromptError, match="ids are 0 to 99"):
        reader.read(request(TextPrompt(text="é")))


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    reader = PromptReader.load(tmp_path, vocab_size=VOCAB_SIZE, max_model_len=16, eos_token_ids=[])
    with pytest.raises(PromptError, match="/v1/completions") as caught:
        reader.read(request(chat("hi")))
    assert (caught.value.code, caught.value.param) == (ErrorCode.NO_CHAT_TEMPLATE, "messages")


def test_the_longest_prompt_leaves_room_for_one_token(reader: PromptReader) -> None:
    assert reader.read(request(TextPrompt(text="x" * 15))).max_new_tokens == 1


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 12), (12, 12), (3, 3)])
def test_limits_of_the_answer(reader: PromptReader, max_tokens: int | None, expected: int) -> None:
    assert reader.read(request(TextPrompt(text="xxxx"), max_tokens=max_tokens)).max_new_tokens == expected


def test_stop_tokens_hold_end_of_sequence_unless_ignored(reader: PromptReader) -> None:
    prompt = TokenPrompt(token_ids=(7,))
    assert reader.read(request(prompt, stop_token_ids=(9,))).stop_token_ids == {1, 3, 9}
    assert reader.read(request(prompt, stop_token_ids=(9,), ignore_eos=True)).stop_token_ids == {9}


def test_the_sampler_is_told_everything_that_was_asked_of_it(reader: PromptReader) -> None:
    """Also where the prompt ends: penalties and grammars begin there, whatever was generated before."""
    asked: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.8, "top_k": 3, "seed": 11, "choice": 2, "min_p": 0.1, "repetition_penalty": 1.5,
        "frequency_penalty": 0.25, "presence_penalty": -0.5, "json_schema": '{"type":"integer"}',
    }  # fmt: skip
    prompt = TextPrompt(text="abc")
    given = SamplingParams(**asked, logit_bias={7: 2.0}, top_logprobs=4, stop=("x",))
    admitted = reader.read(
        GenerateRequest(
            request_id="r", prompt=prompt, sampling=given, generated_token_ids=(5, 6), generated_characters=0
        )
    )
    expected = RequestSampling(**asked, logit_bias=((7, 2.0),), num_top_logprobs=4, num_prompt_tokens=3)
    assert admitted.sampling == expected
    assert admitted.stop == ("x",)


def test_the_sampler_is_told_in_ids_what_the_answer_must_not_hold(reader: PromptReader) -> None:
    prompt, allowed = TokenPrompt(token_ids=(7,)), (9, 30, 31, 9)
    given = {"min_tokens": 3, "stop_token_ids": (9,), "bad_words": ("a", " bc", "a"), "allowed_token_ids": allowed}
    admitted = reader.read(request(prompt, **given))
    assert admitted.sampling == RequestSampling(
        temperature=1.0,
        num_prompt_tokens=1,
        min_tokens=3,
        end_token_ids=(1, 3, 9),
        allowed_token_ids=(9, 30, 31),
        bad_words=tuple(reader.tokenizer.encode(text, add_special_tokens=False) for text in ("a", " a", "bc", " bc")),
    )
    assert reader.read(request(prompt, min_tokens=3, ignore_eos=True)).sampling.end_token_ids == ()
    assert reader.read(request(prompt, stop_token_ids=(9,))).sampling.end_token_ids == ()


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"min_tokens": 11, "max_tokens": 10}, "min_tokens", "min_tokens is 11, but max_tokens, or what"),
        ({"min_tokens": 3, "json_schema": "{}"}, "min_tokens", "can't be combined with a guide"),
        ({"bad_words": ("a",), "regex": "a"}, "bad_words", "can't be combined with a guide"),
        ({"allowed_token_ids": (4,), "grammar": 'start: "a"'}, "allowed_token_ids", "can't be combined with a guide"),
        ({"allowed_token_ids": (10**9,)}, "allowed_token_ids", "1000000000 is not in this model's vocabulary"),
        ({"bad_words": (" ",)}, "bad_words", "bad_words has ' '"),
        ({"min_tokens": 1, "allowed_token_ids": (1, 3)}, "allowed_token_ids", "may leave no token"),
        ({"regex": "a", "grammar": "b"}, "regex", "not several"),
        ({"json_schema": "{}", "grammar": "b"}, "grammar", "not several"),
    ],
)
def test_exclusions_that_can_not_be_kept_to_are_refused(
    reader: PromptReader, asked: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(PromptError) as refused:
        reader.read(request(TokenPrompt(token_ids=(7,)), **asked))
    assert refused.value.param == param
    assert words in refused.value.message


def test_a_banned_word_that_ends_every_allowed_token_is_refused(reader: PromptReader) -> None:
    [letter] = reader.tokenizer.encode("a", add_special_tokens=False)
    with pytest.raises(PromptError, match="bad_words and allowed_token_ids may leave no token"):
        reader.read(request(TokenPrompt(token_ids=(7,)), bad_words=("a",), allowed_token_ids=(letter,)))
