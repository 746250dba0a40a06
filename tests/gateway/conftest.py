"""Two scripted engines and a gateway before them; only the first engine is listed until a test says otherwise."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_harness import RunningGateway, group, running_gateway
from scripted_engine import ScriptedEngine
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
    """A gateway whose endpoints file lists `engine`."""
    settings = GatewaySettings(
        endpoints_path=tmp_path / "endpoints.json", idle_timeout_seconds=2, retry_after_seconds=1
    )
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        yield gateway
