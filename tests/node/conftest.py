"""One real cluster for all tests of this folder, with the project's own images on its nodes."""

import os
from collections.abc import Iterator

import pytest

from node.durations import Durations
from node.node_programs import node_cache
from node.real_cluster import NAMESPACE_VARIABLE, RealCluster, running_cluster

_DURATIONS = pytest.StashKey[Durations]()


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    if os.environ.get(NAMESPACE_VARIABLE) != "1":
        pytest.skip("changes the network of its namespace: make test-node runs it in one of its own")
    with running_cluster(tmp_path_factory.mktemp("real"), node_cache() / "archives") as found:
        yield found


@pytest.fixture(scope="session")
def durations(pytestconfig: pytest.Config) -> Durations:
    """What took how long; the run ends with it as a table."""
    return pytestconfig.stash.setdefault(_DURATIONS, Durations())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of durations, as documents have it."""
    if _DURATIONS in config.stash:
        terminalreporter.section("durations")
        terminalreporter.write_line(config.stash[_DURATIONS].table())
