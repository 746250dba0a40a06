"""A queue of schemas for one child process to compile, each within its share of CPU time.

The child (`guided.check_process`) is started when it is first needed, and again if it has ended. It forks for each
schema, so an abandoned one costs neither the child nor the next schema.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from stageline_api.engine_http import ErrorCode
from stageline_runtime.engine.errors import EngineRefusal

START_LIMIT_SECONDS: Final = 120.0
"""Until the child has read the tokenizer."""
_STOP_LIMIT_SECONDS: Final = 5.0
"""Limit until the child reports that the killed fork has ended."""
_LINE_LIMIT_BYTES: Final = 1 << 20
_RETRY_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one schema: `fault` is None where it compiled; unknown for one that exceeded its time."""

    fault: str | None = None
    is_over_time: bool = False


class CheckLine:
    """First in, first out; a cancelled caller leaves the queue, and its running fork is killed."""

    def __init__(self, arguments: Sequence[str], cpu_seconds: float, wall_seconds: float, most_waiting: int) -> None:
        """`wall_seconds` are for one schema on a machine that has no time for it."""
        self._arguments = (str(cpu_seconds), *arguments)
        self._wall_seconds = wall_seconds
        self._most_waiting = most_waiting
        self._turn = asyncio.Lock()
        self._child: Process | None = None
        self._starting: asyncio.Task[Process] | None = None
        self.num_waiting = 0
        """The one that is compiled among them."""
        self.num_turns = 0
        """How many schemas the child was given."""

    async def find_out(self, schema: str) -> Finding:
        """Have `schema` compiled when it is its turn.

        Raises:
            EngineRefusal: too many wait, or there is no child to be had.
        """
        if self.num_waiting >= self._most_waiting:
            message = f"{self.num_waiting} JSON schemas, expressions or grammars wait to be compiled already"
            raise EngineRefusal(ErrorCode.NOT_READY, message, _RETRY_SECONDS)
        self.num_waiting += 1
        try:
            async with self._turn:
                return await self._found_by(await self._running(), schema)
        finally:
            self.num_waiting -= 1

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._child is not None:
            await _kill(self._child)

    async def _running(self) -> Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        # If this caller is cancelled, the start continues for the next one.
        return await asyncio.shield(self._starting)

    async def _start(self) -> Process:
        module = "stageline_runtime.guided.check_process"
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *self._arguments, stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
            limit=_LINE_LIMIT_BYTES,
        )  # fmt: skip
        began = None
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                began = await _told(child)
        except TimeoutError:
            pass
        finally:
            if began is None:
                await _kill(child)
        if began is None:
            raise EngineRefusal(ErrorCode.NOT_READY, "JSON schemas can't be compiled: the compiler ended", 5.0)
        self._child = child
        return child

    async def _found_by(self, child: Process, schema: str) -> Finding:
        self.num_turns += 1
        given_up = asyncio.Event()
        talk = asyncio.create_task(self._talk(child, schema, given_up))
        try:
            await asyncio.wait([talk])
        finally:
            given_up.set()
            try:
                await asyncio.wait([talk], timeout=_STOP_LIMIT_SECONDS)
            finally:
                if not talk.done() or talk.exception() is not None or talk.result() is None:
                    # A late answer would be mistaken for the next schema's.
                    talk.cancel()
                    await _kill(child)
        # A child or a fork that exited unasked most likely ran out of memory on this schema.
        return talk.result() or Finding("it could not be compiled")

    async def _talk(self, child: Process, schema: str, given_up: asyncio.Event) -> Finding | None:
        """The child's result for `schema`; its fork is killed when that takes too long, or once it is abandoned.

        Must not be cancelled, which would make the child unusable. None when the child has ended.
        """
        assert child.stdin is not None
        child.stdin.write(json.dumps(schema).encode() + b"\n")
        if (forked := await _told(child)) is None:
            return None
        telling, giving_up = asyncio.create_task(_told(child)), asyncio.create_task(given_up.wait())
        try:
            await asyncio.wait([telling, giving_up], timeout=self._wall_seconds, return_when=asyncio.FIRST_COMPLETED)
            is_told = telling.done()
            if not is_told and child.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(forked["pid"], signal.SIGKILL)
            told = await telling
        finally:
            telling.cancel()
            giving_up.cancel()
        if told is None:
            return None
        return Finding(told.get("error", "it could not be compiled"), told.get("is_over_time", False) or not is_told)


async def _told(child: Process) -> dict[str, Any] | None:
    """The child's next line; None when it has ended."""
    assert child.stdout is not None
    line = await child.stdout.readline()
    told: dict[str, Any] | None = json.loads(line) if line else None
    return told


async def _kill(child: Process) -> None:
    with suppress(ProcessLookupError):
        child.kill()
    await child.wait()
