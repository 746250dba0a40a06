"""A kind or a namespace that can't be listed hinders no other: it is left out, said, and back once it can be."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.fake_kube_api import ELSEWHERE, MODELS, PODS, FakeKubeApi, fake_kube_api
from cluster.operator_under_test import operator_replica
from stageline_kubernetes import reflector
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.login import load_configuration
from stageline_operator.controller.client.resources import CACHE_CLAIM, NODE, PIPELINE_MODEL, POD, WATCHED, ModelKey
from stageline_operator.controller.loop import cluster_view
from stageline_operator.controller.loop.cluster_view import ClusterView
from stageline_operator.controller.settings import OperatorSettings
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view import model_watch
from stageline_operator.controller.view.gang_view import GangView
from stageline_operator.controller.view.model_watch import ModelWatch
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.unreadable import Unreadable

SECONDS = 90.0
NAMESPACES = ("here", "there")
ALL_OF_THERE = {each.path("there") for each in WATCHED if each.namespaced}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubeApi]:
    monkeypatch.setattr(cluster_view, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(model_watch, "_STEADY_SECONDS", 0.1)
    for name in ("FIRST_RETRY", "LONGEST_RETRY", "SETTLE"):
        monkeypatch.setattr(reflector, f"{name}_SECONDS", 0.1)
    with fake_kube_api() as served:
        for path in (MODELS, ELSEWHERE[MODELS]):
            put_model(served, path, "first")
        served.write_kubeconfig(tmp_path / "kubeconfig")
        yield served


def put_model(api: FakeKubeApi, path: str, name: str) -> None:
    namespace = "here" if "/here/" in path else "there"
    meta = {"name": name, "namespace": namespace, "uid": f"{namespace}-{name}", "resourceVersion": "1"}
    api.put(path, {"metadata": meta, "spec": {}})


@dataclass
class Viewing:
    """A view that lists again and again, and what it knows."""

    view: ClusterView
    cache: ObjectCache
    unreadable: Unreadable
    woken: set[ModelKey] = field(default_factory=set)
    """Models to look at again."""

    def knows(self, namespace: str, name: str = "first") -> bool:
        return self.cache.model(ModelKey(namespace, name)) is not None

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for what follows from later lists."""
        async with asyncio.timeout(SECONDS):
            while not is_so():
                await self.view.list_everything()


@asynccontextmanager
async def viewing(kubeconfig: Path) -> AsyncIterator[Viewing]:
    unreadable, cache = Unreadable(), ObjectCache()
    settings = OperatorSettings("image", "me", namespaces=NAMESPACES, relist_seconds=0.1)
    configuration = await load_configuration(kubeconfig, None)
    client = KubeApi(configuration, tries=1, user_agent="test")
    gangs = GangView(client, cache, NAMESPACES, unreadable)
    woken: set[ModelKey] = set()
    view = ClusterView(client, cache, settings, OperatorMetrics(), gangs, unreadable, woken.add)
    watches = (
        ModelWatch(configuration, client, feed.place.namespace, feed.heard, feed.watch_failed, relist, "me")
        for feed, relist in view.models()
    )
    running = [asyncio.create_task(view.run()), *(asyncio.create_task(each.run()) for each in watches)]
    try:
        yield Viewing(view, cache, unreadable, woken)
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await client.close()


def during(tmp_path: Path, use: Callable[[Viewing], Coroutine[Any, Any, None]]) -> None:
    async def scenario() -> None:
        async with viewing(tmp_path / "kubeconfig") as seen:
            await use(seen)

    asyncio.run(scenario())


def test_a_namespace_whose_role_goes_is_forgotten_and_comes_back_with_it(api: FakeKubeApi, tmp_path: Path) -> None:
    async def use(seen: Viewing) -> None:
        await seen.until(lambda: seen.knows("here") and seen.knows("there"))
        api.forbidden |= ALL_OF_THERE
        await seen.until(lambda: not seen.knows("there") and bool(seen.unreadable.needed_for("there", [POD.kind])))
        await seen.until(lambda: seen.view.problem() == "")
        assert seen.unreadable.needed_for("here", [each.kind for each in WATCHED]) == ""
        put_model(api, MODELS, "second")
        await seen.until(lambda: seen.knows("here", "second"))
        api.forbidden.clear()
        await seen.until(lambda: seen.knows("there") and not seen.unreadable.all())

    during(tmp_path, use)


@pytest.mark.parametrize("how", ["forbidden", "broken"])
def test_a_kind_that_can_not_be_listed_from_the_start_is_missing_in_its_namespace_alone(
    api: FakeKubeApi, tmp_path: Path, how: str
) -> None:
    getattr(api, how).add(CACHE_CLAIM.path("there"))

    async def use(seen: Viewing) -> None:
        await seen.until(lambda: seen.view.problem() == "")
        kinds = [each.kind for each in WATCHED if each not in (CACHE_CLAIM, NODE)]
        assert seen.view.missing("here", [*kinds, CACHE_CLAIM.kind]) == seen.view.missing("there", kinds) == ""
        assert seen.view.watches_nodes
        assert "persistentvolumeclaims in namespace there" in seen.unreadable.needed_for("there", [CACHE_CLAIM.kind])
        assert seen.unreadable.needed_for("here", [CACHE_CLAIM.kind]) == ""
        assert seen.unreadable.needed_for("there", [POD.kind]) == ""
        assert seen.knows("there")

    during(tmp_path, use)


@pytest.mark.usefixtures("api")
def test_a_list_that_expires_under_way_leaves_nothing_out_at_once(tmp_path: Path) -> None:
    async def use(seen: Viewing) -> None:
        await seen.until(lambda: seen.view.problem() == "")
        [feed, *_] = [feed for feed, _ in seen.view.models()]
        feed.failed(ApiError("list pipelinemodels: 410 Expired", 410, "Expired"))
        assert seen.unreadable.all() == {}

    during(tmp_path, use)


def test_lists_that_fail_for_a_while_leave_nothing_out_that_is_watched(api: FakeKubeApi, tmp_path: Path) -> None:
    async def use(seen: Viewing) -> None:
        await seen.until(lambda: seen.view.problem() == "")
        api.broken.add(PODS)
        put_model(api, MODELS, "second")
        await seen.until(lambda: seen.knows("here", "second"))
        await seen.view.list_everything()
        assert seen.unreadable.all() == {}

    during(tmp_path, use)


def test_what_gets_no_answer_is_not_waited_for_and_its_models_are_left_alone(
    api: FakeKubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_view, "_FRESH_SECONDS", 0.5)
    api.silent.add(ELSEWHERE[PODS])

    async def use(seen: Viewing) -> None:
        await seen.until(lambda: seen.knows("here") and seen.knows("there"))
        assert seen.view.missing("here", [POD.kind]) == ""
        assert seen.view.missing("there", [POD.kind]) == "pods in namespace there have not been listed yet"
        assert seen.view.serves
        api.silent.clear()
        await seen.until(lambda: not seen.view.missing("there", [POD.kind]))
        assert seen.woken >= {ModelKey("there", "first")}

    during(tmp_path, use)


def test_nothing_readable_says_why(api: FakeKubeApi, tmp_path: Path) -> None:
    api.forbidden |= {PIPELINE_MODEL.path("here"), POD.path("there")}

    async def use(seen: Viewing) -> None:
        await seen.until(lambda: seen.view.problem() != cluster_view.NOT_LISTED)
        assert not seen.view.serves
        assert "the operator's role must allow to list and watch pipelinemodels" in seen.view.problem()
        assert seen.view.watches_nodes
        api.forbidden.remove(POD.path("there"))
        await seen.until(lambda: seen.view.serves)
        await seen.until(lambda: seen.view.problem() == "")

    during(tmp_path, use)


def test_a_replica_that_can_not_act_is_not_ready_and_competes_for_no_lease_until_it_can(
    api: FakeKubeApi, tmp_path: Path
) -> None:
    api.forbidden |= {"/api/v1/namespaces", "/apis/stageline.dev/v1alpha1/namespaces"}
    arguments = ("--namespace", "here,there", "--lease-namespace", "here")

    def asked_for_the_lease() -> bool:
        return any("/leases/" in path for path in api.requests)

    with operator_replica(tmp_path / "kubeconfig", tmp_path / "log", *arguments) as replica:

        def shown() -> str:
            return f"{replica.get('/readyz').text}{replica.log()}\n{api.requests[-30:]}"

        wait_until("it says why", lambda: "nothing can be served" in replica.get("/readyz").text, SECONDS, shown)
        assert replica.get("/readyz").status_code == 503
        assert not asked_for_the_lease()
        assert ("there", "pods") in replica.samples("stageline_operator_unreadable")
        api.forbidden = {each.path("there") for each in WATCHED if each.namespaced}
        wait_until("it is ready", lambda: replica.get("/readyz").is_success, SECONDS, shown)
        wait_until("it competes", asked_for_the_lease, SECONDS, shown)
        assert {where for where, _ in replica.samples("stageline_operator_unreadable")} == {"there"}
        assert api.watches(PODS)
        api.forbidden.clear()
        wait_until("the other is watched", lambda: api.watches(ELSEWHERE[PODS]), SECONDS, shown)
        wait_until("it is ready", lambda: replica.get("/readyz").is_success, SECONDS, shown)


def test_a_kind_that_may_be_listed_and_not_watched_is_left_out_and_the_others_are_watched(
    api: FakeKubeApi, tmp_path: Path
) -> None:
    claims = CACHE_CLAIM.path("here")
    api.unwatchable.add(claims)
    arguments = ("--namespace", "here", "--no-leader-elect")
    with operator_replica(tmp_path / "kubeconfig", tmp_path / "log", *arguments) as replica:

        def shown() -> str:
            return f"{replica.get('/readyz').text}{replica.log()}\n{api.requests[-30:]}"

        def left_out() -> set[tuple[str, ...]]:
            return set(replica.samples("stageline_operator_unreadable"))

        wait_until("it is left out", lambda: left_out() == {("here", "persistentvolumeclaims")}, SECONDS, shown)
        wait_until("it is ready", lambda: replica.get("/readyz").is_success, SECONDS, shown)
        assert api.watches(PODS)
        api.unwatchable.clear()
        wait_until("it is back", lambda: not left_out(), SECONDS, shown)
        wait_until("it is ready", lambda: replica.get("/readyz").is_success, SECONDS, shown)
