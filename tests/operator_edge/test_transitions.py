"""Numbers drawn from two statuses: each failure, restart and duration is counted once."""

from datetime import UTC, datetime, timedelta
from typing import Any

from stageline_api import labels
from stageline_api.failures import FailureClass
from stageline_api.resource.life.status import FailureRecord, GroupStatus, PipelineModelStatus
from stageline_operator.controller.telemetry.startup import Startup
from stageline_operator.controller.telemetry.transitions import Transition, transition_between

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def failure(incarnation: int, seconds_ago: float) -> FailureRecord:
    time = NOW - timedelta(seconds=seconds_ago)
    return FailureRecord(time=time, group=0, incarnation=incarnation, failure_class=FailureClass.OOM_KILLED)


def status(phase: str, incarnation: int, *failures: FailureRecord) -> PipelineModelStatus:
    return PipelineModelStatus(
        groups=(GroupStatus(index=0, incarnation=incarnation, phase=phase),), last_failures=failures
    )


def pod(incarnation: int, seconds_ago: float) -> dict[str, Any]:
    created = (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
    own = {labels.GROUP: "0", labels.INCARNATION: str(incarnation)}
    return {"metadata": {"labels": own, "creationTimestamp": created}}


def test_a_failure_its_restart_and_its_recovery_are_counted_where_they_happen() -> None:
    failed = failure(1, 42)
    steps = [
        (status("Ready", 1), status("Terminating", 1, failed), Transition(failures=("OOMKilled",))),
        (status("Terminating", 1, failed), status("BackingOff", 1, failed), Transition()),
        (status("BackingOff", 1, failed), status("Creating", 2, failed), Transition(restarts=("OOMKilled",))),
        (status("Creating", 2, failed), status("Starting", 2, failed), Transition()),
        (
            status("Starting", 2, failed),
            status("Ready", 2, failed),
            Transition(startups=(Startup(30.0),), recoveries=(("OOMKilled", 42.0),)),
        ),
    ]
    for before, after, wanted in steps:
        assert transition_between(before, after, [pod(2, 25), pod(2, 30)], NOW) == wanted


def test_a_rollout_is_neither_a_restart_nor_a_recovery() -> None:
    begun = transition_between(status("Replacing", 1), status("Creating", 2), [], NOW)
    ready = transition_between(status("Starting", 2), status("Ready", 2), [pod(2, 10)], NOW)
    assert begun == Transition()
    assert ready == Transition(startups=(Startup(10.0),))


def test_a_group_that_stays_ready_is_counted_once() -> None:
    assert transition_between(status("Ready", 1), status("Ready", 1), [pod(1, 10)], NOW) == Transition()
