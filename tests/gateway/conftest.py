"""Two scripted engines and a gateway before them; only the first engine is listed until a test says otherwise."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.fake_kube_api import FakeKubeApi, fake_kube_api
from processes.gateway_harness import RunningGateway, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from processes.span_collector import SpanCollector, span_collector
from stageline_gateway.settings import GatewaySettings


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    """The engine of group 0."""
    engine = ScriptedEngine()
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def other_engine() -> Iterator[ScriptedEngine]:
    """The engine of a second group."""
    engine = ScriptedEngine()
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def gateway(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """A gateway whose endpoints file lists `engine`, and that waits for no group, but long for a busy machine."""
    settings = GatewaySettings(
        endpoints_path=tmp_path / "endpoints.json",
        connect_timeout_seconds=60,
        probe_interval_seconds=0.05,
        probe_timeout_seconds=60,
        hold_seconds=0,
        resume_window_seconds=0,
        retry_after_seconds=1,
    )
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        yield gateway


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubeApi]:
    """An API server that $KUBECONFIG leads to."""
    with fake_kube_api() as api:
        api.write_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield api


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanCollector]:
    """Where spans are sent."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with span_collector() as collector:
        yield collector
