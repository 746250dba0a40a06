"""Whether a JSON schema can guide an answer, found out in a process of its own that is killed when it takes too long.

Compiling a few bytes of schema can take minutes, and nothing in this process could stop it. So each new schema is
compiled in a child first, under a limit of CPU time: what passes compiles on the stage in about that time too. Requests
with a new schema wait in line for the child, up to a number of them; nobody else waits for anything. What was found out
about a schema is remembered, refusals too, so that asking again costs nothing.
"""

import asyncio
import hashlib
import json
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from stageline_api.engine_http import GRAMMAR_MARK, REGEX_MARK, ErrorCode
from stageline_runtime.engine.errors import EngineRefusal, PromptError

CPU_LIMIT_SECONDS: Final = 1.0
"""Of one compile; schemas that people write take thousandths of that."""
WALL_LIMIT_SECONDS: Final = 30.0
"""Of one compile on a machine that has no time for it."""
START_LIMIT_SECONDS: Final = 120.0
"""Until the child has read the tokenizer."""
MOST_WAITING: Final = 64
MOST_REMEMBERED: Final = 1024
_MARKED: Final = {REGEX_MARK: "regular expression", GRAMMAR_MARK: "grammar"}
_POLL_SECONDS: Final = 0.05
_LINE_LIMIT_BYTES: Final = 1 << 20
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


class SchemaCheck:
    """Asks one child at a time; makes the child when it is first needed, and again after it was killed."""

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        cpu_limit_seconds: float = CPU_LIMIT_SECONDS,
    ) -> None:
        self._arguments = (str(model_dir), str(vocab_size), *map(str, sorted(eos_token_ids)))
        self._cpu_limit_seconds = cpu_limit_seconds
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._child: Process | None = None
        self._known: OrderedDict[str, str | None] = OrderedDict()
        """Hash of a schema -> what is wrong with it."""

    async def check(self, schema: str) -> None:
        """Return once `schema` is known to compile in time.

        Raises:
            EngineRefusal: it doesn't, or too many wait to learn that of theirs.
        """
        key = hashlib.sha256(schema.encode(errors="surrogatepass")).hexdigest()
        if key not in self._known:
            await self._in_turn(key, schema)
        self._known.move_to_end(key)
        fault = self._known[key]
        if fault is not None:
            what = next((name for mark, name in _MARKED.items() if schema.startswith(mark)), "JSON schema")
            message = f"The {what} can't guide an answer: {fault}."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="response_format")

    async def close(self) -> None:
        if self._child is not None:
            await self._kill(self._child)

    async def _in_turn(self, key: str, schema: str) -> None:
        if self._num_waiting >= MOST_WAITING:
            message = f"{self._num_waiting} requests wait for their JSON schemas to be compiled already"
            raise EngineRefusal(ErrorCode.QUEUE_FULL, message, 2.0)
        self._num_waiting += 1
        try:
            async with self._turn:
                if key not in self._known:
                    self._remember(key, await self._fault(schema))
        finally:
            self._num_waiting -= 1

    def _remember(self, key: str, fault: str | None) -> None:
        self._known[key] = fault
        if len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)

    async def _fault(self, schema: str) -> str | None:
        child = await self._running()
        try:
            return await self._ask(child, schema)
        except BaseException:
            # Its answer, should it still come, would be taken for the next one's.
            await self._kill(child)
            raise

    async def _running(self) -> Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        module = "stageline_runtime.guided.check_process"
        child = self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *self._arguments, stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
            limit=_LINE_LIMIT_BYTES,
        )  # fmt: skip
        assert child.stdout is not None
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                began = await child.stdout.readline()
        except BaseException:
            await self._kill(child)
            raise
        if not began:
            await self._kill(child)
            raise EngineRefusal(ErrorCode.NOT_READY, "JSON schemas can't be compiled: the compiler ended", 5.0)
        return child

    async def _ask(self, child: Process, schema: str) -> str | None:
        assert child.stdin is not None
        assert child.stdout is not None
        before, deadline = _cpu_seconds(child.pid), time.monotonic() + WALL_LIMIT_SECONDS
        child.stdin.write(json.dumps(schema).encode() + b"\n")
        answer = asyncio.ensure_future(child.stdout.readline())
        try:
            while True:
                await asyncio.wait([answer], timeout=_POLL_SECONDS)
                if answer.done():
                    break
                if _cpu_seconds(child.pid) - before > self._cpu_limit_seconds or time.monotonic() > deadline:
                    await self._kill(child)
                    return "it takes too long to compile"
        finally:
            answer.cancel()
        line = answer.result()
        # A child that ended ran out of memory, most likely: over this schema.
        found: str | None = json.loads(line)["error"] if line else "it could not be compiled"
        return found

    async def _kill(self, child: Process) -> None:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _cpu_seconds(pid: int) -> float:
    """CPU time that process `pid` has used, by Linux's account; infinite when it is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_A_SECOND
