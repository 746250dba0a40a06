"""Renders chat messages with the model's own Jinja template, to the same text as transformers' `apply_chat_template`.

The template is part of the model, so it runs in Jinja's immutable sandbox (no attribute it could escape through, no
`range` above 100 000), with limits on its output and its time. Its memory is not limited: like the weights, the
user that deploys the model chooses it.
"""

import ctypes
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import structs

from stageline_api.engine_http import (
    ChatMessage,
    ChatPrompt,
    ErrorCode,
    TemplateArgument,
    ToolCallFormat,
    ToolFunction,
)
from stageline_api.failures import FailureClass
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.call_arguments import WriteArguments, as_sent, as_text, ways_to_write
from stageline_runtime.engine.text.system_turns import shows_late_system, ways_to_write_system
from stageline_runtime.termination import RuntimeFailure

T = TypeVar("T")
REASONING_NAMES: Final = ("reasoning_content", "reasoning", "thinking")
"""Names that templates use for an assistant turn's reasoning."""
_REASONING_READ: Final = re.compile(rf"""[.'"](?:{"|".join(REASONING_NAMES)})\b""")
MAX_RENDERED_CHARACTERS = 16 * 1024 * 1024
RENDER_LIMIT_SECONDS = 5.0
"""Of CPU time. The largest chat that may be sent, 8,192 messages or megabytes of text, takes less than 0.5."""
_SYSTEM_PROBE: Final = "words of the system"
_PROBE_CHAT: Final = (ChatMessage(role="system", content=_SYSTEM_PROBE), ChatMessage(role="user", content="hello"))
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Content(Enum):
    """The value passed to a template for null content beside tool calls, in the order of trial."""

    MISSING = "missing"
    """As transformers gives it now."""
    NONE = "none"
    """As it did before, when many templates were written."""
    EMPTY = "empty"


class ChatTemplate:
    """A compiled chat template. Rendering is safe from any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        limit_seconds: float = RENDER_LIMIT_SECONDS,
        max_characters: int = MAX_RENDERED_CHARACTERS,
    ) -> None:
        """Compile `source`; `special_tokens` (`bos_token`, `eos_token`, …) become variables of the template.

        Raises:
            RuntimeFailure: class ModelLoad; the template isn't valid Jinja.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
            takes_tools = "tools" in self._variables
        except TemplateSyntaxError as error:
            raise RuntimeFailure(
                FailureClass.MODEL_LOAD,
                f"the model's chat template is not valid Jinja: line {error.lineno}: {error.message}",
                operation="compile chat template",
            ) from error
        self.takes_tools = takes_tools
        """Whether the template shows tools to the model."""
        self.tool_call_format = _tool_call_format(source) if takes_tools else None
        """The model's format of tool calls, as far as the template shows it; None when it doesn't."""
        self.has_thoughts = "</think>" in source
        """Whether the model's answers may begin with reasoning, as the template's marks show."""
        self.takes_reasoning = _REASONING_READ.search(source) is not None
        """Whether the template uses the assistant's reasoning of earlier turns."""
        self._null_content: Content | None = None
        """The value passed to this template for null content, once a chat has shown it."""
        self._has_system: bool | None = None
        """Whether it shows system turns, once a chat has had one."""
        self._special_tokens = dict(special_tokens)
        self._limit_seconds = limit_seconds
        self._max_characters = max_characters

    def reads(self, name: str) -> bool:
        """Whether the template looks at a variable of this name."""
        return name in self._variables

    def takes_effort(self, effort: str) -> bool:
        """Whether the template can request this reasoning effort from the model."""
        return "reasoning_effort" in self._variables or (effort == "none" and "enable_thinking" in self._variables)

    def shows_system(self) -> bool:
        """Whether a system turn at the beginning is shown to the model. No client's words are looked for: a template
        may read a switch in them, and leave it out."""
        if self._has_system is None:
            try:
                text = self.render(_PROBE_CHAT)
            except PromptError:  # a client that sends a chat gets this error
                return True
            self._has_system = _SYSTEM_PROBE in text
        return self._has_system

    def arguments_of(self, prompt: ChatPrompt) -> dict[str, TemplateArgument]:
        """More variables for `render`.

        Raises:
            PromptError: naming `chat_template_kwargs`; one of them is not the client's to set.
        """
        for name in prompt.template_arguments:
            if name in _OWN_VARIABLES or name in self._special_tokens:
                message = f"chat_template_kwargs can't set {name!r}: it has a field of its own, or is the model's."
                raise PromptError(ErrorCode.INVALID_VALUE, message, param="chat_template_kwargs")
        effort = prompt.reasoning_effort
        told: dict[str, TemplateArgument] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            told["enable_thinking"] = False
        return told | prompt.template_arguments

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolFunction] = (),
        add_generation_prompt: bool = True,
        arguments: Mapping[str, TemplateArgument] = MappingProxyType({}),
    ) -> str:
        """The prompt text of `messages`, ending where the assistant's answer begins.

        Raises:
            PromptError: the template refuses the messages, fails on them, or exceeds its bounds.
        """
        # Fresh dicts for each call: a template that edits a message must not change the request.
        variables = {
            **arguments,
            **self._special_tokens,
            "tools": [_plain_tool(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _run_with_time_limit(lambda: self._generate_in_any_way(messages, variables), self._limit_seconds)
        except PromptError:
            raise
        except _TimeLimitExceededError as error:
            raise _refused(f"The model's chat template {error} on these messages.") from error
        except TemplateError as error:
            raise _refused(f"The model's chat template refuses these messages: {error.message}") from error
        except Exception as error:
            raise _refused(f"The model's chat template fails on these messages: {error}") from error

    def render_to_continue(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolFunction] = (),
        arguments: Mapping[str, TemplateArgument] = MappingProxyType({}),
    ) -> str:
        """The prompt text up to the last message's words, cut as transformers does for `continue_final_message`.

        A marker rendered after them shows the place: the words may also be in what the template writes of its own.

        Raises:
            PromptError: as `render`, or the template doesn't write the words as they are, once.
        """
        *earlier, last = messages
        marker = secrets.token_hex(16)
        marked = structs.replace(last, content=f"{last.content}{marker} ")
        words, *after = self.render([*earlier, marked], tools, False, arguments).split(marker)
        said = last.content.strip()
        if not said or len(after) != 1 or not words.rstrip().endswith(said):
            raise _refused(
                "continue_final_message: the model's chat template doesn't show the last message's words once, as they "
                "are."
            )
        # Whether a template keeps the blanks at a message's end shows in the one after the marker.
        return words if after[0].startswith(" ") else words.rstrip()

    def _generate_in_any_way(self, messages: Sequence[ChatMessage], variables: dict[str, Any]) -> str:
        """The text of `messages` as they are, or with their system turns folded where the template refuses those, or
        leaves their words out."""
        if not any(message.role == "system" for message in messages):
            return self._generate_with_calls(messages, variables)
        texts: list[str] = []
        refusals: list[Exception] = []
        for turns in ways_to_write_system(messages, lambda: self._refuses_system(variables)):
            try:
                text = self._generate_with_calls(turns, variables)
            except PromptError:
                raise
            except Exception as error:
                refusals.append(error)
                continue
            if shows_late_system(turns, text):
                return text
            texts.append(text)
        # Prefer the earliest form: the first one is as the client sent it.
        if texts:
            return texts[0]
        raise refusals[0]

    def _refuses_system(self, variables: dict[str, Any]) -> bool:
        """Whether the template refuses a chat with an initial system turn that gives no other reason to refuse."""
        try:
            self._generate_with_calls(_PROBE_CHAT, variables)
        except PromptError:
            raise
        except Exception:  # whatever its code raises
            return True
        return False

    def _generate_with_calls(self, messages: Sequence[ChatMessage], variables: dict[str, Any]) -> str:
        """The text, with null contents and call arguments written in the first form that the template can use."""
        if not any(message.is_content_null and message.tool_calls for message in messages):
            return self._generate_with(Content.EMPTY, messages, variables)
        if self._null_content is not None:
            try:
                return self._generate_with(self._null_content, messages, variables)
            except PromptError:
                raise
            except Exception:  # what served earlier chats doesn't serve this one
                self._null_content = None
        self._null_content, text = self._try_contents(messages, variables)
        return text

    def _try_contents(self, messages: Sequence[ChatMessage], variables: dict[str, Any]) -> tuple[Content | None, str]:
        """What to give for content that is null so that the calls beside it are shown, and the text with it.

        A template may take that for an empty turn, or write `None`. Which calls are shown is found by other names for
        them. None: no way shows all calls; the text then is with the first that the template takes.
        """
        marker = secrets.token_hex(8)
        marked = [_with_marked_calls(message, marker) for message in messages]
        count = sum(len(message.tool_calls) for message in messages)
        shown: dict[Content, str] = {}
        refusals: list[Exception] = []
        for content in Content:
            try:
                shown[content] = self._generate_with(content, marked, variables)
            except PromptError:
                raise
            except Exception as error:
                refusals.append(error)
        if not shown:
            raise refusals[-1]
        fewest = min(text.count("None") for text in shown.values())
        fitting = [one for one, text in shown.items() if text.count(marker) >= count and text.count("None") == fewest]
        chosen = fitting[0] if fitting else next(iter(shown))
        return (chosen if fitting else None), self._generate_with(chosen, messages, variables)

    def _generate_with(self, content: Content, messages: Sequence[ChatMessage], variables: dict[str, Any]) -> str:
        """The text with the arguments of calls written in the first way that the template can use."""
        refusal: Exception | None = None
        has_calls = any(message.tool_calls for message in messages)
        for write in ways_to_write(messages) if has_calls else (as_sent,):
            try:
                plain = [_plain_message(message, write, content) for message in messages]
                return self._generate(variables | {"messages": plain})
            except PromptError:
                raise
            except Exception as error:
                # If no form works, report another form's error, not that the template can't use text.
                refusal = refusal if write is as_text else error
        assert refusal is not None, "the first way is no text"
        raise refusal

    def _generate(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > self._max_characters:
                raise _refused(f"The model's chat template makes more than {self._max_characters} characters of them.")
        return "".join(pieces)


def _with_marked_calls(message: ChatMessage, marker: str) -> ChatMessage:
    calls = tuple(structs.replace(call, name=call.name + marker) for call in message.tool_calls)
    return structs.replace(message, tool_calls=calls)


def _plain_message(message: ChatMessage, write: WriteArguments, content: Content) -> dict[str, Any]:
    """A message in the form that templates expect: keys without a value are omitted."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.is_content_null and message.tool_calls and content is not Content.EMPTY:
        plain |= {"content": None}
        if content is Content.MISSING:
            del plain["content"]
    if message.reasoning is not None:
        plain |= dict.fromkeys(REASONING_NAMES, message.reasoning)
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": write(call.arguments)}}
            for call in message.tool_calls
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name}
    return plain | {key: value for key, value in optional.items() if value is not None}


def _plain_tool(tool: ToolFunction) -> dict[str, Any]:
    said = {name: value for name, value in structs.asdict(tool).items() if value is not None}
    return {"type": "function", "function": said}


def _tool_call_format(source: str) -> ToolCallFormat | None:
    """The format that the template's source shows. Control tokens never appear in text, so they are not parsed."""
    if "<tool_call>" in source:
        # Some templates write the same tags around XML of their own; only JSON in them is understood.
        return None if "<function=" in source else ToolCallFormat.TAGGED
    if "[TOOL_CALLS]" in source:
        return ToolCallFormat.ARRAY
    if "<|python_tag|>" in source or '"parameters": ' in source:
        return ToolCallFormat.OBJECT
    return None


def no_chat_template() -> PromptError:
    return PromptError(
        ErrorCode.NO_CHAT_TEMPLATE,
        "This model has no chat template, so it can't take messages; send a prompt to /v1/completions instead.",
        param="messages",
    )


def no_tool_format(takes_tools: bool) -> PromptError:
    """The refusal of tools that the model would have to call in a format of its own."""
    why = "writes calls in a form that isn't understood here" if takes_tools else "has no place for tools"
    return PromptError(
        ErrorCode.INVALID_VALUE,
        f"This model's chat template {why}, so it can't choose among tools by itself; a tool_choice that requires a "
        "call holds the answer to the tools' schema instead.",
        param="tools",
    )


def _refused(message: str) -> PromptError:
    return PromptError(ErrorCode.INVALID_VALUE, message, param="messages")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012 - the declared type of Extension.tags

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(time_format: str) -> str:
    # Local time, as in transformers: "today" in a system prompt is the server's date.
    return datetime.now().strftime(time_format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_LEAST_WAIT_SECONDS: Final = 0.01


class _TimeLimitExceededError(Exception):
    """The code ran longer than it may."""


class _Stop(SystemExit):
    # A SystemExit: no `except Exception` of the code swallows it, and should it come just after the code has ended,
    # the thread ends by it without a traceback.
    pass


def _run_with_time_limit(function: Callable[[], T], limit_seconds: float) -> T:
    """Call `function` in a thread of its own and return its result or raise its exception.

    Python can't end a thread from outside, but it can raise an exception in one at its next bytecode, which is
    enough for a loop written in Jinja. The thread serves only this call, so a late exception hits no other code.
    The limit counts its CPU time, because on a busy machine it may wait long to run.

    Raises:
        _TimeLimitExceededError: it did not end within `limit_seconds`; it is stopped at its next bytecode.
    """
    outcome: Future[T] = Future()
    clock: Future[int] = Future()

    def call() -> None:
        try:
            clock.set_result(time.pthread_getcpuclockid(threading.get_ident()))
            outcome.set_result(function())
        except _Stop:
            return
        except Exception as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=call, name="time-limited", daemon=True)
    thread.start()
    left = limit_seconds
    while left > 0:
        thread.join(max(left, _LEAST_WAIT_SECONDS))
        if not thread.is_alive():
            return outcome.result()
        try:
            left = limit_seconds - time.clock_gettime(clock.result())
        except OSError:  # it has just ended, and its clock with it
            left = _LEAST_WAIT_SECONDS
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop))
    raise _TimeLimitExceededError(f"took more than {limit_seconds:g} s of CPU time")
