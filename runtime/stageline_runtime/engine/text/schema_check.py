"""Checks whether a JSON schema can constrain an answer, in a child process that is killed when it takes too long.

Compiling a few bytes of schema can take minutes, and this process could not stop it. So a child first compiles each
new schema and walks it a little, under limits of CPU time: a schema that passes takes the stage about as long. Only
requests with a new schema wait for that.

There are two queues. In the first each schema has a short share of CPU time, far more than a handwritten one takes.
A schema that exceeds it starts again in the second queue, where the expensive ones wait for each other. So a cheap
schema waits only for the short shares of expensive ones, however many there are. Requests with the same schema wait
for it together; when the last of them has left, it is abandoned. Results are cached by schema, refusals too, so
that a repeated check costs nothing.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stageline_api.engine_http import GRAMMAR_MARK, REGEX_MARK, ErrorCode
from stageline_runtime.engine.errors import EngineRefusal, PromptError
from stageline_runtime.engine.text.check_line import CheckLine

CPU_LIMIT_SECONDS: Final = 1.0
"""Per schema; handwritten schemas take hundredths of that."""
QUICK_CPU_SECONDS: Final = 0.1
"""Of one schema in the first line."""
WALL_SECONDS_A_CPU_SECOND: Final = 30.0
"""On a machine that has no time for it."""
WAIT_LIMIT_SECONDS: Final = 60.0
"""Of one request, the lines and its compile together."""
MOST_WAITING: Final = 256
MOST_DEAR_WAITING: Final = 64
MOST_REMEMBERED: Final = 1024
_MARKED: Final = {REGEX_MARK: "regular expression", GRAMMAR_MARK: "grammar"}


@dataclass(slots=True)
class _UnderWay:
    """A schema that is being found out about, and how many requests wait for that."""

    task: asyncio.Task[str | None]
    """What is wrong with it."""
    num_waiting: int = 0


class SchemaCheck:
    """Starts its children when they are first needed: most engines never have an expensive schema."""

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        cpu_limit_seconds: float = CPU_LIMIT_SECONDS,
        wait_limit_seconds: float = WAIT_LIMIT_SECONDS,
    ) -> None:
        arguments = (str(model_dir), str(vocab_size), *map(str, sorted(eos_token_ids)))
        self._wait_limit_seconds = wait_limit_seconds
        self._quick, self._dear = (
            CheckLine(arguments, cpu_seconds, cpu_seconds * WALL_SECONDS_A_CPU_SECOND, most_waiting)
            for cpu_seconds, most_waiting in (
                (min(QUICK_CPU_SECONDS, cpu_limit_seconds), MOST_WAITING),
                (cpu_limit_seconds, MOST_DEAR_WAITING),
            )
        )
        self._under_way: dict[str, _UnderWay] = {}
        self._known: OrderedDict[str, str | None] = OrderedDict()
        """Hash of a schema -> its fault, None if it has none."""

    async def check(self, schema: str) -> None:
        """Return once `schema` is known to compile in time.

        Raises:
            EngineRefusal: it doesn't, or too many wait to learn that of theirs.
        """
        key = hashlib.sha256(schema.encode(errors="surrogatepass")).hexdigest()
        fault = self._known[key] if key in self._known else await self._found_out(key, schema)
        if key in self._known:
            self._known.move_to_end(key)
        if fault is not None:
            message = f"The {_name_of(schema)} can't guide an answer: {fault}."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="response_format")

    async def close(self) -> None:
        for under_way in self._under_way.values():
            under_way.task.cancel()
        for line in (self._quick, self._dear):
            await line.close()
        tasks = [under_way.task for under_way in self._under_way.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _found_out(self, key: str, schema: str) -> str | None:
        """Its fault, once that is known; when no request waits for it any more, it is abandoned."""
        under_way = self._under_way.get(key)
        if under_way is None:
            under_way = self._under_way[key] = _UnderWay(asyncio.create_task(self._find_out(key, schema)))
        under_way.num_waiting += 1
        try:
            async with asyncio.timeout(self._wait_limit_seconds):
                await asyncio.wait([under_way.task])
        except TimeoutError:
            raise self._waited_too_long(schema) from None
        finally:
            under_way.num_waiting -= 1
            if not under_way.num_waiting:
                under_way.task.cancel()
                del self._under_way[key]
        if under_way.task.cancelled():
            raise EngineRefusal(ErrorCode.NOT_READY, "The engine ends.", 2.0)
        return under_way.task.result()

    async def _find_out(self, key: str, schema: str) -> str | None:
        found = await self._quick.find_out(schema)
        if found.is_over_time:
            found = await self._dear.find_out(schema)
        fault = "it takes too long to compile, or to follow" if found.is_over_time else found.fault
        self._known[key] = fault
        if len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)
        return fault

    def _waited_too_long(self, schema: str) -> EngineRefusal:
        message = (
            f"The {_name_of(schema)} could not be compiled within {self._wait_limit_seconds:g} s: "
            f"{self._quick.num_waiting + self._dear.num_waiting} JSON schemas, expressions or grammars wait for that."
        )
        return EngineRefusal(ErrorCode.NOT_READY, message, 2.0)


def _name_of(schema: str) -> str:
    return next((name for mark, name in _MARKED.items() if schema.startswith(mark)), "JSON schema")
