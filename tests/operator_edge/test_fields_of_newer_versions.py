"""Fields that this version doesn't know are passed over wherever a spec is read, not only by the pass."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, cast

from stageline_api.resource import pipeline_model
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop.autoscaler import Autoscaler
from stageline_operator.controller.settings import OperatorSettings
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.planner.autoscaling import GroupLoad
from stageline_operator.planner.group.failure import restart_policy
from stageline_operator.planner.types import PlannedEvent

BUSY = GroupLoad(running=4, waiting=9, slots=4, kv_usage=0.9, longest_wait_seconds=60.0)


class Cluster:
    """An API server that takes a scale, an engine that is busy, and a recorder of Events."""

    def __init__(self) -> None:
        self.scaled = asyncio.Event()

    async def patch(self, *_: object) -> None:
        self.scaled.set()

    async def loads(self, _: ModelKey, ready: Mapping[int, int]) -> Collection[GroupLoad]:
        return [BUSY for _ in ready]

    def record(self, _: object, event: PlannedEvent) -> None:
        assert event.type == "Normal", event


def test_a_model_with_an_unknown_field_of_autoscaling_is_scaled() -> None:
    async def scenario() -> None:
        cache, cluster = ObjectCache(), cast(Any, Cluster())
        metadata = {"name": "m", "namespace": "ns", "uid": "u", "resourceVersion": "1"}
        spec = {"replicas": 1, "autoscaling": {"maxReplicas": 3, "ofALaterVersion": {"any": 1}}}
        status = {"groups": [{"index": 0, "incarnation": 1, "phase": "Ready"}]}
        cache.put(pipeline_model.KIND, {"metadata": metadata, "spec": spec, "status": status})
        scaling = asyncio.create_task(
            Autoscaler(OperatorSettings("image", "me"), cluster, cache, cluster, cluster).run()
        )
        async with asyncio.timeout(60):
            await cluster.scaled.wait()
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)

    asyncio.run(scenario())


def test_a_restart_policy_with_an_unknown_field_is_read() -> None:
    assert restart_policy({"restart": {"maxRestarts": 7, "ofALaterVersion": 1}}).max_restarts == 7
