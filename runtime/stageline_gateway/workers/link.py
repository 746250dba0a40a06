"""A worker's end of the socket to its supervisor, on the worker's event loop.

It says that the loop runs, tells what is asked of this worker, and asks for what all of them say. A supervisor that
does not read keeps it from nothing: what it can't take is left out. When the socket ends the supervisor has, and the
worker is to end as well.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stageline_gateway.workers.messages import (
    Alive,
    Answered,
    Ask,
    Begin,
    Drain,
    Frames,
    Message,
    Serving,
    Stop,
    Tell,
    Told,
    ToWorker,
    frame,
)
from stageline_gateway.workers.rounds import COUNTERS, PATIENCE_SECONDS

logger = logging.getLogger(__name__)

ALIVE_SECONDS: Final = 1.0
TELL_EVERY: Final = 2
"""Of its own accord, in times of `ALIVE_SECONDS`: what a killed worker had counted since is lost."""
MOST_UNSENT_BYTES: Final = 1024 * 1024
_READ_BYTES: Final = 256 * 1024
_MARGIN_SECONDS: Final = 2.0


class SilentError(Exception):
    """A worker, or the supervisor, does not answer; the text says who."""


class Link:
    """`tell` has what this worker says on each topic."""

    def __init__(
        self,
        tell: Mapping[str, Callable[[], bytes]],
        on_begin: Callable[[Begin], None],
        on_drain: Callable[[], None],
        on_stop: Callable[[Stop], None],
    ) -> None:
        self._tell = tell
        self._on_begin = on_begin
        self._on_drain = on_drain
        self._on_stop = on_stop
        self._writer: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Answered]] = {}
        self._number = 0
        self._has_begun = False
        """Before that a report would not have what earlier workers in this place had counted."""
        self._serves = False

    def now_serves(self) -> None:
        """This worker takes requests."""
        self._serves = True
        self.say(Serving())

    async def run(self, end: socket.socket) -> None:
        """Until the supervisor is gone, which is a `Stop` too."""
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        if self._serves:
            self.now_serves()
        speaking = asyncio.create_task(self._speak())
        frames = Frames(msgspec.msgpack.Decoder(ToWorker))
        try:
            while data := await reader.read(_READ_BYTES):
                for message in frames.take(data):
                    self._take(message)  # type: ignore[arg-type]
        except ConnectionError:
            pass
        except Exception as error:  # a bug; without the supervisor this worker is to end
            logger.exception("a bug in a worker's link: %s", type(error).__name__)
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
        self._on_stop(Stop(withdraw=False))

    def say(self, message: Message) -> None:
        writer = self._writer
        if writer is not None and writer.transport.get_write_buffer_size() < MOST_UNSENT_BYTES:
            writer.write(frame(message))

    async def ask(self, topic: str) -> Answered:
        """What all workers say. Raises SilentError."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[Answered]
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.say(Ask(number, topic))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS + _MARGIN_SECONDS):
                answered = await answer
        except TimeoutError:
            raise SilentError("The supervisor of this gateway's workers does not answer.") from None
        finally:
            del self._asked[number]
        if answered.silent:
            raise SilentError(f"Workers of this gateway do not answer: {', '.join(map(str, answered.silent))}.")
        return answered

    async def _speak(self) -> None:
        for count in range(1 << 62):
            self.say(Alive())
            if self._has_begun and count % TELL_EVERY == 0:
                self._say_on(COUNTERS, 0)
            await asyncio.sleep(ALIVE_SECONDS)

    def _take(self, message: ToWorker) -> None:
        match message:
            case Begin():
                self._on_begin(message)
                self._has_begun = True
            case Tell():
                self._say_on(message.topic, message.number)
            case Answered():
                with contextlib.suppress(KeyError, asyncio.InvalidStateError):
                    self._asked[message.number].set_result(message)
            case Drain():
                self._on_drain()
            case Stop():
                self._on_stop(message)

    def _say_on(self, topic: str, number: int) -> None:
        try:
            body = self._tell[topic]()
        except Exception as error:  # a bug; who asked is told that this worker was silent
            logger.exception("a bug in a worker's report: %s", type(error).__name__)
            return
        self.say(Told(number, topic, body))
