"""What a pass says and writes of a model that it must leave alone: another installation's, or of a refused spec."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, cast

import pytest

from cluster.cached_observation import as_served
from cluster.planned_cluster import SETTING, PlannedCluster, tiny_model
from stageline_kubernetes.client import KubeApi
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop import reconciler
from stageline_operator.controller.loop.cluster_view import ClusterView
from stageline_operator.controller.loop.event_recorder import EventRecorder
from stageline_operator.controller.loop.reconciler import Reconciler
from stageline_operator.controller.settings import LeaseName, OperatorSettings
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.pod_poller import PodPoller
from stageline_operator.planner.types import PlannedEvent

KEY = ModelKey("default", "tiny")
SETTINGS = OperatorSettings("stageline:test", "me", lease=LeaseName("ops"))


class Server(KubeApi):
    """Takes every patch: of a status as the model's next version, of another object as it is."""

    def __init__(self, cache: ObjectCache) -> None:
        self.cache = cache
        self.applied: list[dict[str, Any]] = []

    async def patch(
        self, _resource: Any, path: str, body: Any, _content_type: str, _query: Mapping[str, str]
    ) -> dict[str, Any]:
        model = self.cache.model(KEY)
        assert model is not None
        version = int(model["metadata"]["resourceVersion"]) + 1000
        if path.endswith("/status"):
            return as_served({**model, "status": body[-1]["value"]}, KEY.namespace, version)
        self.applied.append(body)
        return as_served(body, KEY.namespace, version)


class Seeing:
    """A view in which everything can be read."""

    watches_nodes = False

    def missing(self, _namespace: str, _kinds: Iterable[str]) -> str:
        return ""


class Told:
    """A recorder of Events."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def record(self, _model: Any, event: PlannedEvent) -> None:
        self.reasons.append(event.reason)


class Passes:
    """Passes over one model. Make it inside an event loop."""

    def __init__(self, cluster: PlannedCluster, manifest: Mapping[str, Any], operator: str) -> None:
        self.cache, self.told = ObjectCache(), Told()
        self.server = Server(self.cache)
        status = cluster.status.model_copy(update={"operator": operator})
        served = as_served({**manifest, "status": status.to_manifest()}, KEY.namespace, 1)
        self.cache.put("PipelineModel", served)
        self.take(cluster)
        poller = PodPoller(self.server, self.cache, lambda _: None)
        view, told = cast(ClusterView, Seeing()), cast(EventRecorder, self.told)
        parts = (self.server, self.cache, view, SETTING, told, OperatorMetrics(), poller)
        self.reconciler = Reconciler(SETTINGS, *parts)

    def take(self, cluster: PlannedCluster, version: int = 2) -> None:
        """The pods and other objects as they are now."""
        for (kind, _), each in cluster.objects.items():
            if kind != "Secret":
                self.cache.put(kind, as_served(each, KEY.namespace, version))

    def status(self) -> dict[str, Any]:
        model = self.cache.model(KEY)
        assert model is not None
        return dict(model["status"])


def serving() -> PlannedCluster:
    cluster = PlannedCluster(tiny_model(replicas=2))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    return cluster


def test_a_model_of_another_installation_is_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        cluster = serving()
        passes = Passes(cluster, cluster.model.to_manifest(), "elsewhere/stageline-operator")
        seconds = [await passes.reconciler.reconcile(KEY) for _ in range(2)]
        assert seconds == [reconciler._REPORT_INTERVAL_SECONDS] * 2, "it is looked at again by itself"
        assert passes.told.reasons == ["OtherOperator"], "a change of the model is no reason to tell again"
        monkeypatch.setattr(reconciler, "_REPORT_INTERVAL_SECONDS", 0.0)
        await passes.reconciler.reconcile(KEY)
        assert passes.told.reasons == ["OtherOperator"] * 2
        assert passes.server.applied == []

    asyncio.run(scenario())


def test_a_pass_over_a_refused_spec_reports_pods_and_keeps_the_budget_alone() -> None:
    async def scenario() -> None:
        cluster = serving()
        manifest = cluster.model.to_manifest()
        manifest["spec"]["parallelism"]["pipeline"] = -4
        passes = Passes(cluster, manifest, SETTINGS.claim)
        await passes.reconciler.reconcile(KEY)
        assert (passes.status()["readyReplicas"], passes.server.applied) == (2, [])
        cluster.make_ready(False)
        passes.take(cluster, 3)
        await passes.reconciler.reconcile(KEY)
        found = {each["type"]: (each["status"], each["reason"]) for each in passes.status()["conditions"]}
        assert (found["Available"], found["Degraded"]) == (
            ("False", "GroupsNotReady"),
            ("True", "BadConfiguration"),
        )
        assert passes.status().get("readyReplicas", 0) == 0, passes.status()
        [budget] = passes.server.applied
        assert (budget["kind"], budget["spec"]["minAvailable"]) == ("PodDisruptionBudget", 0)

    asyncio.run(scenario())
