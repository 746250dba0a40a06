"""What is kept of a whole answer until it is sent: its text, and its log probabilities as the JSON that will be sent.

Twenty alternatives a token are 14 KiB as objects and a tenth of that as JSON; they become JSON as they come. All of it
counts in the room of open requests, so an answer that outgrows it is refused, and a gateway isn't ended by its sum.
"""

import secrets
from dataclasses import dataclass, field
from typing import Any, Final

from stageline_api.engine_http import Delta, FinishReason
from stageline_gateway.endpoints.json_answers import encode_json
from stageline_gateway.openai_api.answer_shapes import AnswerShape

PIECE_BYTES: Final = 80
"""What one more string costs beyond its characters."""


@dataclass(slots=True)
class KeptChoice:
    """One choice. `take` says what more it holds."""

    shape: AnswerShape
    with_logprobs: bool
    _texts: list[str] = field(default_factory=list)
    _lists: dict[str, list[bytes]] = field(default_factory=dict)
    """Items of each list of the log probabilities, as JSON without brackets."""
    _rest: dict[str, Any] = field(default_factory=dict)

    def take(self, delta: Delta) -> int:
        """Keep a piece of the answer; returns the bytes that it holds."""
        held_bytes = 0
        if delta.text:
            self._texts.append(delta.text)
            held_bytes += 4 * len(delta.text) + PIECE_BYTES
        if self.with_logprobs and delta.logprobs:
            for name, value in self.shape.logprobs(delta.logprobs).items():
                held_bytes += self._keep(name, value)
        return held_bytes

    def written(self, reason: FinishReason) -> tuple[dict[str, Any], str, bytes]:
        """The choice, a mark that stands in it for its log probabilities, and those as JSON."""
        choice = self.shape.whole("".join(self._texts), reason)
        mark = secrets.token_hex(16)
        if not self.with_logprobs:
            return choice, mark, b""
        for name, value in self.shape.logprobs(()).items():
            self._keep(name, value)
        lists = [encode_json(name) + b":[" + b",".join(items) + b"]" for name, items in self._lists.items()]
        rest = [encode_json(name) + b":" + encode_json(value) for name, value in self._rest.items()]
        return choice | {"logprobs": mark}, mark, b"{" + b",".join(lists + rest) + b"}"

    def _keep(self, name: str, value: Any) -> int:
        if not isinstance(value, list):
            self._rest[name] = value
            return 0
        kept = self._lists.setdefault(name, [])
        if value:
            kept.append(encode_json(value)[1:-1])
        return len(kept[-1]) + PIECE_BYTES if value else 0
