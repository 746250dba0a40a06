"""An answer in the words of another API than chat completions, whole or as that API's events.

The answer is a chat's until it is written: limits, places, resume and usage are the same. Its text is kept to the end
in both cases, since the last event repeats it, and counts in the room of open requests as it comes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stageline_api.engine_http import Admitted, Delta, Finished
from stageline_gateway.client_stream import ClientStream, Pause
from stageline_gateway.endpoints.answers import RESUMED_COMMENT, RESUMED_HEADER, SERVER_ERRORS, Answer, Exchange
from stageline_gateway.endpoints.json_answers import JsonAnswer, encode_json
from stageline_gateway.endpoints.kept_answer import KeptChoice
from stageline_gateway.engine_client.run_events import Resumed, StreamEvent
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.answer_shapes import Dialect, Event, usage
from stageline_gateway.openai_api.thoughts import ThoughtTokens

Refuse = Callable[[ApiError, Mapping[str, str]], Response]
"""Writes a refusal in the API's own form."""


class TranslatedAnswer(Answer):
    def __init__(self, exchange: Exchange, dialect: Dialect, refuse: Refuse, streams: bool) -> None:
        super().__init__(exchange)
        self._dialect = dialect
        self._refuse = refuse
        self._streams = streams
        self._thoughts = ThoughtTokens(None)

    async def _answer(self, client: ClientStream) -> None:
        exchange, shape = self.exchange, self.exchange.shapes[0]
        kept = KeptChoice(shape, with_logprobs=False)

        def take(choice: int, events: Sequence[StreamEvent]) -> Pause | None:
            told: list[Event] = []
            is_over = False
            for event in events:
                exchange.count(event, choice)
                match event:
                    case Admitted():
                        exchange.admitted(event)
                        self._thoughts = ThoughtTokens(event.thoughts)
                        told += self._dialect.begin(event.prompt_tokens)
                    case Delta():
                        exchange.permit.body.grow(kept.take(event))
                        self._thoughts.take(event.text, len(event.token_ids))
                        if self._streams and event.text:
                            told += self._taken(shape.piece(event.text, None))
                    case Resumed():
                        self.resumes += 1
                        self._said_first = RESUMED_COMMENT
                    case Finished():
                        is_over = True
                        told += self._taken([] if self._streams else shape.piece(kept.text, None))
                        told += self._taken(shape.held_back(event.reason))
                        reason = shape.closing(event.reason)["finish_reason"]
                        told += self._dialect.end(reason, self._counts(event), event.stop_string)
            if not self._streams or not (told or is_over):
                return None
            return self._write(client, _named_events(told), more=not is_over)

        await exchange.run(take, None)
        if not self._streams:
            resumed = {RESUMED_HEADER: str(self.resumes)} if self.resumes else {}
            await self._send_at_once(client, JsonAnswer(self._dialect.whole(), headers=exchange.headers | resumed))

    def _counts(self, end: Finished) -> dict[str, Any]:
        return usage([end]) | {"completion_tokens_details": {"reasoning_tokens": self._thoughts.count}}

    def _taken(self, choices: Sequence[dict[str, Any]]) -> list[Event]:
        return [event for choice in choices for event in self._dialect.take(choice["delta"])]

    async def _fail(self, failure: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.started:
            await self._refuse(failure, self.exchange.headers)(scope, receive, send)
            return
        if failure.status >= SERVER_ERRORS:
            self.exchange.meter.metrics.broken_answers.labels(self.exchange.meter.model).inc()
        body = _named_events(self._dialect.failed(failure))
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _named_events(events: Sequence[Event]) -> bytes:
    return b"".join(
        b"event: " + str(event["type"]).encode() + b"\ndata: " + encode_json(event) + b"\n\n" for event in events
    )
