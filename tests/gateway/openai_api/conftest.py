"""One engine and one gateway for each file: its tests look at single requests, and leave both as they were.

What a gateway counts goes on from test to test.
"""

from collections.abc import Iterator

import pytest

from processes.gateway_harness import RunningGateway, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from stageline_gateway.settings import GatewaySettings


@pytest.fixture(scope="module")
def engine_of_the_file() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def gateway_of_the_file(
    engine_of_the_file: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    settings = GatewaySettings(
        endpoints_path=tmp_path_factory.mktemp("gateway") / "endpoints.json",
        probe_interval_seconds=0.05,
        hold_seconds=0,
        resume_window_seconds=0,
        retry_after_seconds=1,
    )
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine_of_the_file.url))
        yield gateway


@pytest.fixture
def engine(engine_of_the_file: ScriptedEngine) -> ScriptedEngine:
    """The engine of group 0, as if it were new."""
    engine_of_the_file.forget()
    return engine_of_the_file


@pytest.fixture
def gateway(gateway_of_the_file: RunningGateway, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """A gateway whose endpoints file lists `engine`, and that waits for no group, but long for a busy machine."""
    listed = gateway_of_the_file.endpoints.read_text()
    yield gateway_of_the_file
    if gateway_of_the_file.endpoints.read_text() != listed:
        gateway_of_the_file.serve(group(engine.url))
