"""What a gateway shows to engines that ask for a key, and where it has it from."""

import asyncio
import base64
import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.fake_kube_api import SECRETS, FakeKubeApi
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_core_server import until
from processes.scripted_engine import ScriptedEngine
from stageline_api.engine_access import KEYS_ENTRY, KEYS_SECRET
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.groups import discovery_kubernetes
from stageline_gateway.groups.backends import DiscoveredGroups
from stageline_gateway.groups.discovery_kubernetes import KubernetesDiscovery
from stageline_gateway.settings import GatewaySettings

OLD, NEW = "old-Key-0123456789", "new-Key-0123456789"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}
TOKENIZED = (200, '{"token_ids": [5], "max_model_len": 99}')


@pytest.fixture
def keyed(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """A gateway that knows two keys, the new one first."""
    engine.replies["POST /v1/tokenize"] = TOKENIZED
    settings = GatewaySettings(tmp_path / "endpoints.json", engine_keys=f"{NEW}\n{OLD}", hold_seconds=0)
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        yield gateway


def answers(gateway: RunningGateway) -> list[int]:
    asked = (("/v1/completions", BODY), ("/tokenize", BODY))
    return [gateway.http.post(path, json=body).status_code for path, body in asked]


def test_the_first_key_is_shown_to_engines(keyed: RunningGateway, engine: ScriptedEngine) -> None:
    engine.keys = (OLD, NEW)
    assert answers(keyed) == [200, 200]


def test_an_engine_that_takes_another_key_is_lost_for_requests_and_the_reason_is_said(
    keyed: RunningGateway, engine: ScriptedEngine
) -> None:
    engine.keys = (OLD,)
    refused = keyed.http.post("/v1/completions", json=BODY)
    assert refused.status_code >= 500, refused.text
    assert "The engine does not take this gateway's key." in refused.text
    assert (OLD in refused.text, NEW in refused.text) == (False, False)
    assert engine.requests == []
    asked = keyed.http.post("/tokenize", json=BODY)
    assert (asked.status_code, "does not take this gateway's key" in asked.text) == (502, True), asked.text


def test_beginnings_of_prompts_are_asked_for_with_the_key(keyed: RunningGateway, engine: ScriptedEngine) -> None:
    engine.keys, engine.held = (NEW,), ()
    other = ScriptedEngine(keys=(NEW,), held=())
    other.start()
    try:
        keyed.serve(group(engine.url), group(other.url, 1))
        eventually(lambda: engine.num_probes > 2 and other.num_probes > 2, "engines are not probed")
        assert keyed.http.post("/v1/completions", json=BODY).status_code == 200
    finally:
        other.stop()


def secret(*lines: str, entry: str = KEYS_ENTRY) -> dict[str, Any]:
    data = {entry: base64.b64encode("\n".join(lines).encode()).decode()}
    return {"metadata": {"name": KEYS_SECRET}, "data": data}


def looks(api: FakeKubeApi, since: int = 0) -> int:
    """How often the Secret was asked for."""
    return sum(asked.startswith(SECRETS) for asked in api.requests[since:])


@contextlib.asynccontextmanager
async def following(key: EngineKey) -> Any:
    """Discovery in a cluster, which reads the key too."""
    discovery = KubernetesDiscovery("here", DiscoveredGroups("here"), 1, key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery_kubernetes, "KNOWN_KEY_SECONDS", 0.2)
        watch = asyncio.create_task(discovery.run())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


def test_in_a_cluster_the_namespaces_secret_is_read_when_it_comes_and_when_it_changes(api: FakeKubeApi) -> None:
    async def run() -> None:
        key = EngineKey()
        async with following(key):
            await until(lambda: f"{SECRETS}/{KEYS_SECRET}" in api.requests, "the Secret is asked for")
            assert key.authorization == ""
            api.put(SECRETS, secret(OLD))
            await until(lambda: key.authorization == f"Bearer {OLD}", "the key is known")
            api.put(SECRETS, secret(NEW, OLD))
            await until(lambda: key.authorization == f"Bearer {NEW}", "the change is known")
            api.delete(SECRETS, KEYS_SECRET)
            asked = len(api.requests)
            await until(lambda: looks(api, since=asked) > 1, "it looks again")
            assert key.authorization == f"Bearer {NEW}", "engines that run still take it"

    asyncio.run(run())


@pytest.mark.usefixtures("api")
def test_discovery_that_fails_unexpectedly_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again, and would be there twice."""

    def fail(*_: object) -> None:
        raise LookupError("nobody thought of this")

    async def run() -> None:
        with pytest.raises((LookupError, ExceptionGroup)) as raised:
            await KubernetesDiscovery("here", DiscoveredGroups("here"), 1, EngineKey()).run()
        assert "nobody thought of this" in "".join(traceback.format_exception(raised.value))
        left = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        assert left == []

    monkeypatch.setattr(DiscoveredGroups, "accept", fail)
    asyncio.run(run())


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (secret("short"), "ValueError: key 1 must be 16 or more"),
        (secret(NEW, entry="other"), "the Secret has no 'keys'"),
    ],
)
def test_a_secret_that_can_not_be_used_is_told_once_and_not_shown(
    api: FakeKubeApi, caplog: pytest.LogCaptureFixture, broken: dict[str, Any], words: str
) -> None:
    async def run() -> EngineKey:
        key = EngineKey()
        api.put(SECRETS, broken)
        async with following(key):
            await until(lambda: looks(api) > 2, "it looks again and again")
        return key

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()).authorization == ""
    told = [record.getMessage() for record in caplog.records if KEYS_SECRET in record.getMessage()]
    assert len(told) == 1, told
    assert words in told[0]
    assert NEW not in caplog.text
