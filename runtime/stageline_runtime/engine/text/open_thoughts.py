"""Whether a chat's prompt ends within the assistant's reasoning, which the answer then continues. Pure.

Reasoning is at the start of an answer, between `<think>` and `</think>`. It is open where the text that the
template adds for an answer ends with the first mark, or has text after it. It is also open where the text to
continue starts with the first mark, from the template or its own, and has no second one.
"""

from typing import Final

from msgspec import structs

from stageline_api.engine_http import ChatMessage, ChatPrompt

OPENING: Final = "<think>"
CLOSING: Final = "</think>"
_NO_MARK: Final = "(think)"
"""As long as the mark, so that the prompt keeps its bounds."""


def without_others_marks(prompt: ChatPrompt) -> ChatPrompt:
    """`prompt` with other words where one of its messages ends with the mark, except for the one to continue.

    What the text of this one has where an answer begins is the template's. It is `prompt` itself where nothing changes.
    """
    others = prompt.messages[:-1] if prompt.continue_final_message else prompt.messages
    if not any(_ends_with_mark(message.content) for message in others):
        return prompt
    changed = tuple(_without_mark(message) for message in others)
    return structs.replace(prompt, messages=changed + prompt.messages[len(others) :])


def is_in_thought(prompt: ChatPrompt, text: str) -> bool:
    """Whether `text`, rendered from `prompt`, ends within reasoning; no other message ends with a mark."""
    if not prompt.continue_final_message:
        return _ends_with_mark(text)
    words = prompt.messages[-1].content.strip()
    before = text.rstrip().removesuffix(words)
    begun = (OPENING if _ends_with_mark(before) else "") + words
    return begun.startswith(OPENING) and CLOSING not in begun


def may_have_begun(text: str) -> bool:
    """Whether the last mark in `text` is an opening one, of any origin."""
    return text.rfind(OPENING) > text.rfind(CLOSING)


def is_begun_for_the_answer(text: str, without: str) -> bool:
    """Whether the template adds such a mark for an answer: `text` has more of them than `without`, which it made of the
    same messages without the words for an answer. Counted, since a template may write the time before them."""
    return text.count(OPENING) > without.count(OPENING)


def _ends_with_mark(text: str) -> bool:
    return text.rstrip().endswith(OPENING)


def _without_mark(message: ChatMessage) -> ChatMessage:
    if not _ends_with_mark(message.content):
        return message
    before, _, after = message.content.rpartition(OPENING)
    return structs.replace(message, content=before + _NO_MARK + after)
