"""The bodies of `/tokenize` and `/detokenize`, checked; vLLM has these routes, and SDKs send what they send elsewhere.

A chat's body, or a completion's, can be asked about as it is, and the API whose body it is says what of it is right.
What makes the prompt counts. What would only make an answer changes nothing here, so it is named as ignored, like what
changes nothing there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta, structs

from stageline_api.engine_http import ChatPrompt, Prompt, TextPrompt
from stageline_gateway.errors import bad_value, wrong_value
from stageline_gateway.openai_api.checked_types import Strict, checked, optional_fields
from stageline_gateway.openai_api.known_fields import COMPLETION_KNOWN, GUIDED
from stageline_gateway.openai_api.request_types import ChatRequest, CompletionRequest, TokenId
from stageline_gateway.openai_api.translate import prompt_of_chat
from stageline_gateway.openai_api.validation import (
    IgnoredFields,
    parse_chat,
    parse_completion,
    settled,
    without_effect,
)

MAX_TOKENS: Final = 1024 * 1024
OF_PROMPT: Final = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "tools",
        "tool_choice",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "reasoning_effort",
    }
)
"""Fields of chats and completions that decide what the prompt is."""


class TokenizeOptions(Strict, frozen=True):
    """What a body of `/tokenize` has beside a chat's or a completion's fields."""

    add_special_tokens: bool | None = None
    """Left out, a prompt gets them and a chat doesn't: its template writes them."""
    return_token_strs: bool = False


class DetokenizeBody(Strict, frozen=True):
    """Token ids to turn into text."""

    model: str
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]


@dataclass(frozen=True, slots=True)
class ToTokenize:
    """A prompt to tokenize."""

    model: str
    prompt: Prompt
    options: TokenizeOptions
    ignored: tuple[str, ...]
    """Names of fields that were left out."""


def parse_tokenize(fields: Mapping[str, Any], strict: bool = False) -> ToTokenize:
    """Raises ApiError 400 as the API does whose body it is, and for a body of both or none."""
    options = checked(TokenizeOptions, {name: value for name, value in fields.items() if _is_option(name)})
    rest = {name: value for name, value in fields.items() if not _is_option(name)}
    given = [name for name in ("prompt", "messages") if rest.get(name) is not None]
    if len(given) != 1:
        raise bad_value("prompt", "or 'messages' should be there, and not both")
    rest = {name: value for name, value in rest.items() if name in given or name not in ("prompt", "messages")}
    ignored: IgnoredFields = {}
    asked, prompt = (_text if given == ["prompt"] else _chat)(rest, ignored, strict)
    without_effect(dict(_of_the_answer(asked, rest)), strict, ignored)
    return ToTokenize(asked.model, prompt, options, tuple(ignored))


def _is_option(name: str) -> bool:
    return name in TokenizeOptions.__struct_fields__


def _text(fields: Mapping[str, Any], ignored: IgnoredFields, strict: bool) -> tuple[CompletionRequest, Prompt]:
    match fields["prompt"]:
        case str(text) | [str(text)]:
            return parse_completion(fields, ignored, strict), TextPrompt(text=text)
        case other:
            raise wrong_value("prompt", "should be one string", other, "invalid_type")


def _chat(fields: Mapping[str, Any], ignored: IgnoredFields, strict: bool) -> tuple[ChatRequest, Prompt]:
    asked = parse_chat(fields, ignored, strict)
    return asked, only_counted(prompt_of_chat(asked))


def only_counted(prompt: Prompt) -> Prompt:
    """`prompt` of which no answer is read: in which form a model writes calls doesn't matter."""
    return structs.replace(prompt, tools_guided=True) if isinstance(prompt, ChatPrompt) else prompt


def _of_the_answer(asked: ChatRequest | CompletionRequest, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of `fields`, as they were sent, that ask for something and make no prompt."""
    usual = optional_fields(type(asked))
    for name, value in fields.items():
        if name in GUIDED:
            yield name, value
        elif name in usual and name not in OF_PROMPT:
            yield name, value if getattr(asked, name) != usual[name] else None


def parse_detokenize(fields: Mapping[str, Any], strict: bool = False) -> tuple[DetokenizeBody, tuple[str, ...]]:
    """The body, and names of fields that were left out; raises ApiError 400 naming the first that is wrong."""
    ignored: IgnoredFields = {}
    body = checked(DetokenizeBody, settled(fields, COMPLETION_KNOWN, strict, ignored))
    return body, tuple(ignored)
