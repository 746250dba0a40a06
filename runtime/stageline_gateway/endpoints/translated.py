"""An answer in the words of another API than chat completions, whole or as that API's events.

The answer is a chat's until it is written: limits, places, resume and usage are the same. Its text is kept to the end
in both cases, since the last event repeats it, and counts in the room of open requests as it comes.
"""

from collections.abc import Sequence
from typing import Any

from stageline_api.engine_http import Admitted, Delta, Finished
from stageline_gateway.endpoints.answers import KEEP_ALIVE_COMMENT, Answer, Exchange, Refuse
from stageline_gateway.endpoints.json_answers import JsonAnswer, encode_json
from stageline_gateway.endpoints.kept_answer import KeptChoice
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.answer_shapes import Dialect, Event


class TranslatedAnswer(Answer):
    def __init__(self, exchange: Exchange, dialect: Dialect, refuse: Refuse, streams: bool) -> None:
        super().__init__(exchange, streams=streams, refuse=refuse)
        self._dialect = dialect
        self._kept = KeptChoice(exchange.shapes[0], with_logprobs=False)
        self.keep_alive = KEEP_ALIVE_COMMENT if dialect.ping is None else _named_events([dialect.ping])

    def _opening(self, event: Admitted) -> bytes:
        return self._encoded(self._dialect.begin(event.prompt_tokens))

    def _delta(self, choice: int, event: Delta) -> bytes:
        self.exchange.permit.body.grow(self._kept.take(event))
        if not self._streams or not event.text:
            return b""
        return _named_events(self._taken(self.exchange.shapes[choice].piece(event.text, None)))

    def _closing(self, choice: int, event: Finished) -> bytes:
        shape = self.exchange.shapes[choice]
        rest = [] if self._streams else shape.piece(self._kept.text, None)
        events = self._taken([*rest, *shape.held_back(event.reason)])
        reason = shape.closing(event.reason)["finish_reason"]
        return self._encoded([*events, *self._dialect.end(reason, self._counts(), event.stop_string)])

    def _failed(self, failure: ApiError) -> bytes:
        return _named_events(self._dialect.failed(failure))

    def _encoded(self, events: Sequence[Event]) -> bytes:
        """Nothing of an answer that is sent whole."""
        return _named_events(events) if self._streams else b""

    async def _whole(self) -> JsonAnswer:
        return self._json(self._dialect.whole())

    def _counts(self) -> dict[str, Any]:
        return {"completion_tokens_details": {"reasoning_tokens": 0}} | self._usage()

    def _taken(self, choices: Sequence[dict[str, Any]]) -> list[Event]:
        return [event for choice in choices for event in self._dialect.take(choice["delta"])]


def _named_events(events: Sequence[Event]) -> bytes:
    return b"".join(
        b"event: " + str(event["type"]).encode() + b"\ndata: " + encode_json(event) + b"\n\n" for event in events
    )
