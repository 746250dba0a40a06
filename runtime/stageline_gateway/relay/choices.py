"""Several choices of one request: each is a request of its own to the engine, and their events become one stream.

The merged stream begins with one Admitted, given once every choice has been admitted, so that a refusal of any of them
is a refusal of the request. The first choice that fails ends all the others. Few events wait for the client, so a slow
reader slows the choices down instead of filling memory.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from stageline_api.engine_http import Admitted, GenerateRequest
from stageline_gateway.engine_client.stream_events import StreamEvent

ChoiceEvent = tuple[int, StreamEvent]
EventStream = AsyncGenerator[StreamEvent, None]


def split(request: GenerateRequest, count: int) -> list[GenerateRequest]:
    """`count` requests that differ in id and in the choice that keys their noise."""
    if count == 1:
        return [request]
    return [
        request.model_copy(
            update={
                "request_id": f"{request.request_id}-{choice}",
                "sampling": request.sampling.model_copy(update={"choice": choice}),
            }
        )
        for choice in range(count)
    ]


async def merged(streams: Sequence[EventStream]) -> AsyncGenerator[ChoiceEvent, None]:
    """Events of all `streams`, each with its choice, as they come; raises what the first failing stream raises."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[ChoiceEvent | Exception | None] = asyncio.Queue(maxsize=len(streams))
    start = asyncio.Event()
    feeds = [asyncio.create_task(_feed(choice, stream, queue, start)) for choice, stream in enumerate(streams)]
    try:
        admitted = [await _take(queue) for _ in streams]
        start.set()
        if admitted[0] is not None:
            yield admitted[0]
        num_open = len(streams)
        while num_open:
            taken = await _take(queue)
            if taken is None:
                num_open -= 1
            else:
                yield taken
    finally:
        for feed in feeds:
            feed.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)


async def _feed(
    choice: int, stream: EventStream, queue: "asyncio.Queue[ChoiceEvent | Exception | None]", start: asyncio.Event
) -> None:
    """Queue a stream's events, waiting for `start` after the first; then None, or what it raised."""
    try:
        async with aclosing(stream) as events:
            async for event in events:
                await queue.put((choice, event))
                if isinstance(event, Admitted):
                    await start.wait()
        await queue.put(None)
    except Exception as error:  # raised again by whoever reads the queue
        await queue.put(error)


async def _take(queue: "asyncio.Queue[ChoiceEvent | Exception | None]") -> ChoiceEvent | None:
    taken = await queue.get()
    if isinstance(taken, Exception):
        raise taken
    return taken
