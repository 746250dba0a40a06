"""What waits to be written to a client that reads slowly: one merged delta and the end of the stream.

However far the client lags, a stream holds at most its own output once, and a lagging client gets several tokens in
one line.
"""

import asyncio

from stageline_api.engine_http import Delta, Failed, Finished, TokenLogprob


class EventMailbox:
    """Between the task that takes events from the core and the task that writes them. One event loop only."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: Finished | Failed | None = None
        self._filled = asyncio.Event()

    def add(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        """Add output; nothing is queued for neither text nor ids."""
        assert self._end is None, f"output after the end of a stream: {text!r} {token_ids}"
        if text or token_ids:
            self._texts.append(text)
            self._token_ids += token_ids
            self._logprobs += logprobs
            self._filled.set()

    def end(self, event: Finished | Failed) -> None:
        """Add the last event."""
        assert self._end is None, f"a second end of a stream: {event!r} after {self._end!r}"
        self._end = event
        self._filled.set()

    def wake(self) -> None:
        """Let the reader go on, with nothing if nothing has come."""
        self._filled.set()

    async def take(self) -> list[Delta | Finished | Failed]:
        """Wait for something and take all of it: at most one delta, then the end when it has come."""
        await self._filled.wait()
        self._filled.clear()
        events: list[Delta | Finished | Failed] = []
        if self._texts:
            text = "".join(self._texts)
            events.append(Delta(text=text, token_ids=tuple(self._token_ids), logprobs=tuple(self._logprobs)))
            self._texts, self._token_ids, self._logprobs = [], [], []
        if self._end is not None:
            events.append(self._end)
        return events
