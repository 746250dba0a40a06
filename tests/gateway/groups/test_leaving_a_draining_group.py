"""A request that only waits leaves a group that drains, but not while a token of it is on its way to the client.

Once it has a token, no group of another revision may go on with it: it would have left for nobody.
"""

import asyncio

import pytest

from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_api.engine_http import GenerateRequest, SamplingParams, TextPrompt
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.run_events import EngineLostError, LossKind
from stageline_gateway.groups.backends import Backends, DiscoveredGroups
from stageline_gateway.groups.routing import identity
from stageline_gateway.relay.placement import Progress, Runs


def group(index: int, revision: str) -> GroupEndpoint:
    url = f"http://127.0.0.{index + 2}:8000"
    return GroupEndpoint(model="m", group=index, incarnation=1, url=url, ready=True, revision=revision)


async def leave_while_reading_and_while_waiting() -> tuple[bool, LossKind]:
    """Whether it left while its reader was busy, and how it was lost once the reader waited."""
    old, new = group(0, "old"), group(1, "new")
    discovered = DiscoveredGroups("a test")
    discovered.accept(Endpoints(groups=(old, new)))
    backends = Backends(discovered)
    backends.draining_since[identity(old)] = backends.clock()
    runs, connection = Runs(backends), EngineConnection()
    request = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"), sampling=SamplingParams(max_tokens=4))
    with runs.under_way(old, Progress(request)) as run:
        run.opened(connection)
        runs.review()
        left_while_reading = run.is_leaving
        waiting = asyncio.create_task(connection.head(60.0))
        await asyncio.sleep(0)
        runs.review()
        with pytest.raises(EngineLostError) as lost:
            await asyncio.wait_for(waiting, timeout=60)
    connection.close()
    return left_while_reading, lost.value.kind


def test_it_leaves_only_while_its_reader_waits() -> None:
    assert asyncio.run(leave_while_reading_and_while_waiting()) == (False, LossKind.LEFT)
