"""Workers that have no core each rest longer, so that together they take no more of one than a single process."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from stageline_gateway import serving
from stageline_gateway.command import gateway
from stageline_gateway.engine_client.multiplexed import PERIOD_SECONDS
from stageline_gateway.fleet import build_fleets
from stageline_gateway.telemetry.metrics import GatewayMetrics


@pytest.mark.parametrize(
    ("workers", "cores", "turns"),
    [(1, {3}, 1), (1, {0, 1}, 1), (2, {3}, 2), (2, {0, 1}, 1), (3, {0, 1}, 1.5), (4, {7}, 4)],
)
def test_a_period_is_as_long_as_all_that_share_a_core_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int, cores: set[int], turns: float
) -> None:
    started: list[serving.Serving] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)

    def serve_by_workers(_: int, serves: serving.Serving, *__: object) -> int:
        started.append(serves)
        return 0

    monkeypatch.setattr(serving, "serve_alone", lambda serves, *_: started.append(serves))
    monkeypatch.setattr(serving, "serve_by_workers", serve_by_workers)
    command = ["--endpoints", str(tmp_path / "endpoints.json"), "--workers", str(workers)]

    result = CliRunner().invoke(gateway, command, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    [fleet] = build_fleets(started[0].settings, GatewayMetrics("")).by_namespace.values()
    assert fleet.dispatcher.engine._pool._period_seconds == pytest.approx(turns * PERIOD_SECONDS)
