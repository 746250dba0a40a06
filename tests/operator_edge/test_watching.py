"""Every replica watches, whatever user it runs as, and one that does not watch is not ready."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.fake_kube_api import MODELS, PODS, FakeKubeApi, fake_kube_api
from cluster.operator_under_test import OperatorReplica, operator_replica
from processes.nameless_user import NAMELESS_UID, as_nameless_user, skip_without_namespaces
from stageline_kubernetes.login import load_configuration
from stageline_operator.controller.client.resources import PIPELINE_MODEL, WATCHED
from stageline_operator.controller.view.running_watches import RunningWatches
from stageline_operator.controller.view.watch_source import WatchSource

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
    """PipelineModels watched in this process: how (None: listed) and which, as they come."""

    source: WatchSource
    heard: "asyncio.Queue[tuple[str | None, str]]"


@asynccontextmanager
async def watching(kubeconfig: Path) -> AsyncIterator[Watching]:
    heard: asyncio.Queue[tuple[str | None, str]] = asyncio.Queue()

    def hear(_: object, kind: str | None, manifest: dict[str, Any]) -> None:
        heard.put_nowait((kind, manifest["metadata"]["name"]))

    configuration = await load_configuration(kubeconfig, None)
    source = WatchSource(configuration, [PIPELINE_MODEL], ["here"], hear, lambda: None, "replica_1")
    running = asyncio.create_task(source.run())
    try:
        async with asyncio.timeout(SECONDS):
            yield Watching(source, heard)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def put_model(api: FakeKubeApi, name: str) -> None:
    api.put(MODELS, {"metadata": {"name": name, "namespace": "here"}, "spec": {}})


def test_watching_asks_for_no_user_name(api: FakeKubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: NAMELESS_UID)

    async def watch() -> None:
        put_model(api, "before")
        async with watching(tmp_path / "kubeconfig") as here:
            assert here.source.problem() != ""
            assert await here.heard.get() == (None, "before")
            put_model(api, "later")
            assert await here.heard.get() == ("ADDED", "later")
            assert here.source.problem() == ""

    asyncio.run(watch())


def test_watching_begins_again_after_an_error_that_ends_kopf(api: FakeKubeApi, tmp_path: Path) -> None:
    async def watch() -> None:
        put_model(api, "before")
        async with watching(tmp_path / "kubeconfig") as here:
            assert await here.heard.get() == (None, "before")
            put_model(api, "later")
            assert await here.heard.get() == ("ADDED", "later")
            api.fail_watches()
            assert {await here.heard.get(), await here.heard.get()} == {(None, "before"), (None, "later")}
            put_model(api, "again")
            assert await here.heard.get() == ("ADDED", "again")
            assert here.source.problem() == ""

    asyncio.run(watch())


@OF_EACH_ROLE
def test_a_replica_is_ready_only_once_its_watches_run_and_stays_so_while_they_reconnect(
    api: FakeKubeApi, tmp_path: Path, election: str
) -> None:
    api.refuses_watches = True
    with operator_replica(tmp_path / "kubeconfig", tmp_path / "log", *SERVES_HERE, election) as replica:
        wait_until("watches are refused", lambda: api.watches(PODS) > 1, SECONDS, replica.log)
        refused = replica.get("/readyz")
        assert refused.status_code == 503
        assert "has not begun" in refused.text
        assert replica.get("/healthz").is_success
        api.refuses_watches = False
        wait_ready(api, replica)
        begun = api.watches(PODS)
        api.expire()
        deadline = time.monotonic() + SECONDS
        while api.watches(PODS) == begun:
            assert replica.get("/readyz").is_success, replica.log()
            assert time.monotonic() < deadline, (api.requests[-30:], replica.log())
        assert replica.get("/readyz").is_success, replica.log()


def test_a_short_gap_of_a_watch_is_forgiven_and_a_long_one_is_not() -> None:
    watches = RunningWatches(["/pods", "/models"])
    watches.began("/pods")
    assert watches.problem(0.0) == "the watch of /models has not begun; the log says why"
    watches.began("/models")
    assert watches.problem(0.0) == ""
    watches.broke("/pods", 100.0)
    watches.broke("/pods", 115.0)
    assert watches.problem(130.0) == ""
    assert watches.problem(131.0) == "the watch of /pods has not run for 31 s; the log says why"
    watches.began("/pods")
    assert watches.problem(1000.0) == ""
    watches.all_broke(1000.0)
    assert watches.problem(1030.0) == ""
    assert watches.problem(1040.0) == "the watch of /pods has not run for 40 s, nor 1 more; the log says why"


def test_what_nobody_watches_does_not_count() -> None:
    watches = RunningWatches(["/pods"])
    watches.broke("/api", 0.0)
    watches.began("/pods")
    watches.broke("/api", 1.0)
    watches.began("/nodes")
    assert watches.problem(1000.0) == ""
