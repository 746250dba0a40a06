"""Bounds in seconds of CPU, which hold on a quiet machine only: `make bench-bounds` checks them, `make test` doesn't.

A test that takes the fixture `cpu_bound` runs in both, with all its other assertions. One that asserts nothing else is
marked `bench`, and is left out where bounds are not checked.
"""

from dataclasses import dataclass

import pytest

OPTION = "--cpu-bounds"


@dataclass(frozen=True)
class CpuBound:
    is_checked: bool

    def holds(self, spent_seconds: float, most_seconds: float) -> bool:
        """Whether no more CPU time was spent; always where bounds aren't checked."""
        return not self.is_checked or spent_seconds < most_seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="check bounds in seconds of CPU, on a quiet machine")


@pytest.fixture(scope="session")
def cpu_bound(request: pytest.FixtureRequest) -> CpuBound:
    return CpuBound(bool(request.config.getoption(OPTION)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With the option the tests with bounds alone, else all but those that have nothing else."""
    if config.getoption(OPTION):
        left_out = [item for item in items if "cpu_bound" not in getattr(item, "fixturenames", ())]
    else:
        left_out = [item for item in items if item.get_closest_marker("bench")]
    config.hook.pytest_deselected(items=left_out)
    gone = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in gone]
