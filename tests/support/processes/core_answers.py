"""What a core says of one request, in order: a sink to submit with, and its events to read at any pace."""

import asyncio
from collections.abc import AsyncIterator

from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, EngineCoreApi, PromptEvent, TokenEvent


async def answer_of(core: EngineCoreApi, request: AdmittedRequest) -> list[CoreEvent]:
    """All events of a request, submitted now."""
    return [event async for event in submit(core, request)]


def submit(core: EngineCoreApi, request: AdmittedRequest) -> AsyncIterator[CoreEvent]:
    """Submit a request; its events end with the last that a core may say."""
    events: asyncio.Queue[CoreEvent] = asyncio.Queue()
    core.submit(request, events.put_nowait)
    return _read(events)


async def _read(events: asyncio.Queue[CoreEvent]) -> AsyncIterator[CoreEvent]:
    while True:
        event = await events.get()
        yield event
        if not isinstance(event, TokenEvent | PromptEvent):
            assert events.empty(), f"said after the end: {events.get_nowait()}"
            return
