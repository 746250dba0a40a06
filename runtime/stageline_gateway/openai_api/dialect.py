"""What another API makes of a chat's answer: its own events while the answer comes, or its own object at the end.

A dialect is told the deltas of one choice of a chat, as OpenAI's chunks have them, and keeps what the end repeats. Each
event is a JSON object whose `type` is also its name in the stream. Pure.
"""

from abc import ABC, abstractmethod
from typing import Any

from stageline_gateway.errors import ApiError

Event = dict[str, Any]


class Dialect(ABC):
    """One answer in another API."""

    @abstractmethod
    def begin(self, prompt_tokens: int) -> list[Event]:
        """The request was admitted."""

    @abstractmethod
    def take(self, delta: dict[str, Any]) -> list[Event]:
        """More of the answer: `reasoning_content`, then `content`, then `tool_calls`."""

    @abstractmethod
    def end(self, reason: str, counts: dict[str, Any], stop_string: str | None) -> list[Event]:
        """The answer's end: OpenAI's finish reason and token counts, those spent on thoughts among them, and which of
        the request's stop strings ended it."""

    @abstractmethod
    def failed(self, error: ApiError) -> list[Event]:
        """The end of an answer that had begun and can't go on."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer at once, after its end."""
