"""Holds a request with a JSON schema until its grammar is ready at the sampler, so that no step waits for one.

First the schema is compiled in a process that can be killed (`text.schema_check`). Then the last stage compiles it
beside its steps and reports when it is done. Only then is the request submitted to the core. A group that isn't
serving receives no schema: the core refuses the request itself.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Final

from stageline_api.engine_http import ErrorCode
from stageline_runtime.engine.errors import EngineRefusal
from stageline_runtime.engine.text.schema_check import SchemaCheck
from stageline_runtime.plan_bus.messages import GuideReady, PrepareGuide

STAGE_LIMIT_SECONDS: Final = 60.0
"""For the last stage, which compiles one grammar after the other."""
MOST_SURELY_KEPT: Final = 32
"""Half of what a stage keeps: the latest of these are there without asking."""


class GuidedRequests:
    def __init__(
        self, check: SchemaCheck, ask_stage: Callable[[PrepareGuide], None], is_serving: Callable[[], bool]
    ) -> None:
        self._check = check
        self._ask_stage = ask_stage
        self._is_serving = is_serving
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Event] = {}
        self._kept: OrderedDict[str, None] = OrderedDict()

    async def prepare(self, schema: str) -> None:
        """Return when an answer can be held to `schema` at once.

        Raises:
            EngineRefusal: it never can, or not now.
        """
        await self._check.check(schema)
        if schema not in self._kept and self._is_serving():
            await self._prepare_on_stage(schema)
            self._kept[schema] = None
        if schema in self._kept:
            self._kept.move_to_end(schema)
        if len(self._kept) > MOST_SURELY_KEPT:
            self._kept.popitem(last=False)

    def answered(self, ready: GuideReady) -> None:
        """The last stage is done with a grammar; if it failed there, the request fails with the cause at its first
        token."""
        if (asked := self._asked.get(ready.number)) is not None:
            asked.set()

    async def close(self) -> None:
        await self._check.close()

    async def _prepare_on_stage(self, schema: str) -> None:
        number = next(self._numbers)
        is_ready = self._asked[number] = asyncio.Event()
        try:
            self._ask_stage(PrepareGuide(number, schema))
            async with asyncio.timeout(STAGE_LIMIT_SECONDS):
                await is_ready.wait()
        except TimeoutError:
            message = f"the JSON schema was not compiled on the last stage within {STAGE_LIMIT_SECONDS:g} s"
            raise EngineRefusal(ErrorCode.NOT_READY, message, 2.0) from None
        finally:
            del self._asked[number]
