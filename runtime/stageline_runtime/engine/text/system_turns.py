"""System turns for templates that refuse or omit them. Pure.

Agents send reminders as `system` or `developer` turns at any place. Most templates write such turns unchanged. Some
allow only an initial one, some none, some omit them silently, and many demand that user and assistant alternate.
For their models the text is moved to a user turn.
"""

from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from stageline_api.engine_http import ChatMessage

_FOLDED = frozenset({"system", "user"})


def ways_to_write_system(
    messages: Sequence[ChatMessage], refuses_system: Callable[[], bool]
) -> Iterator[Sequence[ChatMessage]]:
    """`messages` as they are, then with system turns folded.

    First those at the beginning are one turn, and the words of each later one stand in the user's turn beside it, or in
    one of their own. Then the first turn's words stand in a user's turn too, if the template `refuses_system` turns at
    all: another refusal has another reason.
    """
    yield messages
    if any(message.role == "system" for message in messages[1:]):
        yield _folded(messages, keeps_first=True)
    if messages[0].role == "system" and refuses_system():
        yield _folded(messages, keeps_first=False)


def _folded(messages: Sequence[ChatMessage], keeps_first: bool) -> list[ChatMessage]:
    folded: list[ChatMessage] = []
    for message in messages:
        is_first = keeps_first and all(one.role == "system" for one in folded)
        turn = structs.replace(message, role="user") if message.role == "system" and not is_first else message
        if folded and turn.role == folded[-1].role and turn.role in _FOLDED:
            turn = structs.replace(turn, content=f"{folded.pop().content}\n\n{turn.content}")
        folded.append(turn)
    return folded


def shows_late_system(messages: Sequence[ChatMessage], text: str) -> bool:
    """Whether `text` has the words of all system turns after the first turn, with any whitespace between them."""
    shown = "".join(text.split())
    return all("".join(message.content.split()) in shown for message in messages[1:] if message.role == "system")
