"""How the time to ready divides into phases, from pods as a cluster and as a process node show them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stageline_operator.controller.telemetry.startup import Cache, Startup, StartupPhase, startup_of

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def pod(made: float, scheduled: float, preparing: float, prepared: float, running: float, said: str) -> dict[str, Any]:
    """Times in seconds, as a cluster shows them."""
    end = {"startedAt": at(preparing), "finishedAt": at(prepared), "exitCode": 0, "message": said}
    return {
        "metadata": {"creationTimestamp": at(made)},
        "status": {
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(scheduled)}],
            "initContainerStatuses": [{"name": "prepare", "state": {"terminated": end}}],
            "containerStatuses": [
                {"name": "stage", "state": {"running": {"startedAt": at(running)}}},
                {"name": "engine", "state": {"running": {"startedAt": at(running - 1)}}},
            ],
        },
    }


def startup(*pods: dict[str, Any], ready: float) -> Startup:
    found = startup_of(pods, BEGAN + timedelta(seconds=ready))
    assert found is not None
    return found


def test_phases_end_with_the_last_pod_and_add_up_to_the_whole() -> None:
    found = startup(pod(0, 2, 5, 50, 52, "Fetched"), pod(1, 4, 6, 30, 33, "Cached"), ready=80)
    phases = dict(zip(StartupPhase, (4.0, 4.0, 44.0, 28.0), strict=True))
    assert found == Startup(80.0, Cache.COLD, phases)
    assert sum(found.phases.values()) == found.seconds


@pytest.mark.parametrize(
    ("said", "cache"),
    [
        (("Cached", "Cached"), Cache.WARM),
        (("Cached", "Fetched"), Cache.COLD),
        (("Cached", ""), Cache.UNKNOWN),
        (("not ours", "Cached"), Cache.UNKNOWN),
    ],
)
def test_a_start_is_cold_when_any_pod_fetched_and_warm_only_when_all_say_so(
    said: tuple[str, str], cache: Cache
) -> None:
    assert startup(*(pod(0, 0, 1, 2, 3, each) for each in said), ready=9).cache is cache


def test_what_nobody_says_is_left_out() -> None:
    silent = pod(0, 1, 2, 3, 4, "Cached")
    del silent["status"]["initContainerStatuses"]
    assert startup(silent, ready=9).phases == {"schedule": 1.0, "start": 5.0}
    assert startup_of([{"metadata": {}}], BEGAN) is None
    assert startup_of([], BEGAN) is None


def test_of_a_process_node_the_start_time_stands_for_the_scheduler() -> None:
    local = pod(0, 0, 1, 2, 3, "Cached")
    local["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
    local["status"]["startTime"] = at(0.5)
    assert startup(local, ready=4).phases == {"schedule": 0.5, "pull": 1.5, "prepare": 1.0, "start": 1.0}
