"""Every replica watches, whatever user it runs as, and one that does not watch is not ready."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.fake_kube_api import MODELS, PODS, FakeKubeApi, fake_kube_api
from cluster.operator_under_test import OperatorReplica, operator_replica
from processes.nameless_user import NAMELESS_UID, as_nameless_user, skip_without_namespaces
from processes.scripted_core_server import until
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.login import load_configuration
from stageline_operator.controller.client.resources import WATCHED
from stageline_operator.controller.view.model_watch import ModelWatch

SECONDS = 90.0
USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")
SERVES_HERE = ("--namespace", "here", "--lease-namespace", "here")
OF_EACH_ROLE = pytest.mark.parametrize("election", ["--no-leader-elect", "--leader-elect"], ids=["leading", "waiting"])
"""The fake refuses every write, so that a replica which competes for the lease never gets it."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeKubeApi]:
    with fake_kube_api() as served:
        served.write_kubeconfig(tmp_path / "kubeconfig")
        yield served


def watched_paths() -> list[str]:
    return [each.path("here") for each in WATCHED]


def wait_ready(api: FakeKubeApi, replica: OperatorReplica) -> None:
    def shown() -> str:
        return f"{replica.get('/readyz').text}{replica.log()}\n{api.requests[-30:]}"

    wait_until("the replica is ready", lambda: replica.get("/readyz").is_success, SECONDS, shown)


@OF_EACH_ROLE
def test_a_replica_whose_user_has_no_name_home_or_root_to_write_watches_everything(
    api: FakeKubeApi, tmp_path: Path, election: str
) -> None:
    skip_without_namespaces()
    options = (*SERVES_HERE, election)
    with operator_replica(tmp_path / "kubeconfig", tmp_path / "log", *options, under=as_nameless_user()) as replica:
        wait_ready(api, replica)
        assert [path for path in watched_paths() if not api.watches(path)] == []
        assert replica.leads == (election == "--no-leader-elect")
        assert "kopf ended" not in replica.log()


@dataclass
class Watching:
    """PipelineModels watched in this process: events and names as they come, None when kopf has begun, and failures."""

    heard: "asyncio.Queue[tuple[str, str] | None]" = field(default_factory=asyncio.Queue)
    failures: list[ApiError] = field(default_factory=list)
    relists: int = 0

    def hear(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            self.heard.put_nowait((event["type"], event["object"]["metadata"]["name"]))
        if not events:
            self.heard.put_nowait(None)

    def relist(self) -> None:
        self.relists += 1


@asynccontextmanager
async def watching(kubeconfig: Path) -> AsyncIterator[Watching]:
    configuration, here = await load_configuration(kubeconfig, None), Watching()
    api = KubeApi(configuration, tries=1, user_agent="test")
    watch = ModelWatch(configuration, api, "here", here.hear, here.failures.append, here.relist, "replica_1")
    running = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(SECONDS):
            yield here
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.close()


def put_model(api: FakeKubeApi, name: str) -> None:
    api.put(MODELS, {"metadata": {"name": name, "namespace": "here"}, "spec": {}})


def test_watching_asks_for_no_user_name(api: FakeKubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: NAMELESS_UID)

    async def watch() -> None:
        put_model(api, "before")
        async with watching(tmp_path / "kubeconfig") as here:
            assert await here.heard.get() is None, "what kopf lists is no sign that it watches"
            put_model(api, "later")
            assert await here.heard.get() == ("ADDED", "later")
            assert here.failures == []
            assert here.relists >= 2, "for what kopf has listed, and once it watches"

    asyncio.run(watch())


def test_watching_begins_again_after_an_error_that_ends_kopf(api: FakeKubeApi, tmp_path: Path) -> None:
    async def watch() -> None:
        put_model(api, "before")
        async with watching(tmp_path / "kubeconfig") as here:
            assert await here.heard.get() is None, "kopf has begun to watch"
            put_model(api, "later")
            assert await here.heard.get() == ("ADDED", "later")
            listed = here.relists
            api.fail_watches()
            assert await here.heard.get() is None, "kopf has begun again"
            assert here.relists > listed
            assert [("kopf ended" in str(each), each.is_passing) for each in here.failures] == [(True, True)]
            put_model(api, "again")
            assert await here.heard.get() == ("ADDED", "again")

    asyncio.run(watch())


def test_a_watch_of_models_that_is_refused_says_so_and_begins_once_it_is_granted(
    api: FakeKubeApi, tmp_path: Path
) -> None:
    api.unwatchable.add(MODELS)

    async def watch() -> None:
        put_model(api, "before")
        async with watching(tmp_path / "kubeconfig") as here:
            await until(lambda: bool(here.failures), "the refusal is reported")
            assert {each.status for each in here.failures} == {403}
            assert here.heard.empty()
            api.unwatchable.clear()
            assert await here.heard.get() is None, "kopf has begun to watch"

    asyncio.run(watch())


@OF_EACH_ROLE
def test_a_replica_is_ready_only_once_its_watches_run_and_stays_so_while_they_reconnect(
    api: FakeKubeApi, tmp_path: Path, election: str
) -> None:
    api.refuses_watches = True
    with operator_replica(tmp_path / "kubeconfig", tmp_path / "log", *SERVES_HERE, election) as replica:
        words = "nothing can be served: the operator's role must allow to list and watch"
        wait_until("watches are refused", lambda: words in replica.get("/readyz").text, SECONDS, replica.log)
        assert replica.get("/readyz").status_code == 503
        assert replica.get("/healthz").is_success
        api.refuses_watches = False
        wait_ready(api, replica)
        begun = api.watches(PODS)
        api.expire()
        deadline = time.monotonic() + SECONDS
        while api.watches(PODS) == begun:
            readiness = replica.get("/readyz")
            assert readiness.is_success, (readiness.text, replica.log())
            assert time.monotonic() < deadline, (api.requests[-30:], replica.log())
        assert replica.get("/readyz").is_success, replica.log()
