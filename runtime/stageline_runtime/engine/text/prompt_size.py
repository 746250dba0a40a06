"""Estimates how long reading a prompt takes, before it is rendered or tokenized.

A template may write tools and call arguments as indented lines: each value counts with its depth, not by its text
alone. Counting stops at a limit, because it runs on the event loop.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, assert_never

from stageline_api.engine_http import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

QUICK_LENGTH: Final = 8192
"""A text of up to this many characters, or a prompt of this many ids, is read in a few milliseconds."""
MESSAGE_CHARACTERS: Final = 64
"""A chat message costs a template as much time as this many characters of text."""
VALUE_CHARACTERS: Final = 16
"""A value within tools or arguments, in the same sense, beside its text and its indentation."""
INDENT: Final = 4
MAX_COUNTED_DEPTH: Final = 64
_MARKS: Final = re.compile(r"[\[{,]")


def work_of(prompt: Prompt, limit: int) -> int:
    """Cost of reading `prompt`, as a number of characters or ids; counted until it exceeds `limit`."""
    total = 0
    for size in _sizes(prompt):
        total += size
        if total > limit:
            break
    return total


def least_characters(prompt: ChatPrompt, shows_tools: bool) -> int:
    """Characters of the messages, and of the tools where the template shows them to the model."""
    tools = prompt.tools if shows_tools else ()
    written = sum(len(tool.description or "") + _least_written(tool.parameters) for tool in tools)
    return sum(len(message.content) for message in prompt.messages) + written


def _message_characters(message: ChatMessage) -> int:
    names = (message.reasoning, message.name, message.tool_call_id)
    return len(message.content) + sum(len(each) for each in names if each is not None)


def _sizes(prompt: Prompt) -> Iterator[int]:
    match prompt:
        case ChatPrompt():
            yield from (_message_characters(message) + MESSAGE_CHARACTERS for message in prompt.messages)
            for message in prompt.messages:
                for call in message.tool_calls:
                    yield len(call.name) + len(call.id)
                    yield from _value_sizes(call.arguments)
            for tool in prompt.tools:
                yield len(tool.name) + len(tool.description or "") + MESSAGE_CHARACTERS
                yield from _value_sizes(tool.parameters)
        case TextPrompt(text=text):
            yield len(text)
        case TokenPrompt(token_ids=token_ids):
            yield len(token_ids)
        case _:
            assert_never(prompt)


def _value_sizes(value: Any) -> Iterator[int]:
    """Of all that is in `value`, which is JSON, or the text of some."""
    if isinstance(value, str):
        marks = len(_MARKS.findall(value))
        yield len(value) + marks * (VALUE_CHARACTERS + INDENT * min(marks, MAX_COUNTED_DEPTH))
        return
    levels = [iter((value,))]
    while levels:
        for part in levels[-1]:
            text = len(part) if isinstance(part, str) else 0
            yield text + VALUE_CHARACTERS + INDENT * len(levels)
            if isinstance(part, dict):
                yield sum(map(len, part))
                levels.append(iter(part.values()))
                break
            if isinstance(part, list | tuple):
                levels.append(iter(part))
                break
        else:
            levels.pop()


def _least_written(value: Any) -> int:
    """Characters of `value` as JSON without a blank, each number counted as one digit."""
    total, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            total += sum(len(name) + 4 for name in part) + 2
            waiting.extend(part.values())
        elif isinstance(part, list | tuple):
            total += len(part) + 2
            waiting.extend(part)
        else:
            total += len(part) + 2 if isinstance(part, str) else 1
    return total
