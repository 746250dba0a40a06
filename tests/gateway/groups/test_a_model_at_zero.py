"""Requests to a model that is scaled to zero wait for its first group, and are counted meanwhile for an autoscaler."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from processes.gateway_harness import IN_FLIGHT, MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_gateway.settings import GatewaySettings

BODY = {"model": MODEL, "prompt": "hello"}
QUEUED = "stageline_gateway_requests_queued"
COUNTED = (QUEUED, IN_FLIGHT)


ADAPTER = "pirate"


def serve(gateway: RunningGateway, *groups: GroupEndpoint, at_zero: bool) -> None:
    """Write the endpoints file: the model is there whether or not a group is."""
    names = (MODEL,) if at_zero else ()
    adapters = {MODEL: (ADAPTER,)}
    text = Endpoints(groups=groups, models=(MODEL,), adapters=adapters, scaled_to_zero=names).model_dump_json()
    new = gateway.endpoints.with_suffix(".new")
    new.write_text(text)
    new.replace(gateway.endpoints)


def gateway_with(tmp_path: Path, start_hold_seconds: float) -> Iterator[RunningGateway]:
    settings = GatewaySettings(
        tmp_path / "endpoints.json", probe_interval_seconds=0.05, probe_timeout_seconds=60, connect_timeout_seconds=60,
        poll_seconds=0.02, hold_seconds=0, start_hold_seconds=start_hold_seconds,
    )  # fmt: skip
    with running_gateway(settings) as gateway:
        serve(gateway, at_zero=True)
        eventually(lambda: gateway.http.get("/v1/models").json()["data"], "the model never came")
        yield gateway


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[RunningGateway]:
    yield from gateway_with(tmp_path, 3600)


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[RunningGateway]:
    yield from gateway_with(tmp_path, 0.2)


def queued(gateway: RunningGateway) -> float:
    """Requests that wait; what the examples scale by counts them too."""
    counts = {name: sum(value for (each, _), value in gateway.samples().items() if each == name) for name in COUNTED}
    assert counts[QUEUED] <= counts[IN_FLIGHT], counts
    return counts[QUEUED]


def test_a_request_waits_through_zero_and_the_first_start(patient: RunningGateway, engine: ScriptedEngine) -> None:
    with ThreadPoolExecutor(2) as pool:
        at_zero = pool.submit(patient.http.post, "/v1/completions", json=BODY, timeout=120)
        eventually(lambda: queued(patient) == 1, "the waiting request is not counted")
        starting = group(engine.url, ready=False, message="starting")
        serve(patient, starting, at_zero=False)
        eventually(lambda: patient.shown_groups(), "the group that starts never came")
        while_it_starts = pool.submit(patient.http.post, "/v1/completions", json=BODY, timeout=120)
        eventually(lambda: queued(patient) == 2, "the second one does not wait")
        serve(patient, starting.model_copy(update={"ready": True, "message": ""}), at_zero=False)
        for answer in (at_zero.result(120), while_it_starts.result(120)):
            assert answer.status_code == 200, answer.text
    assert queued(patient) == 0


def test_an_adapter_of_it_is_waited_for_by_the_groups_that_will_have_it(
    patient: RunningGateway, engine: ScriptedEngine
) -> None:
    listed = {each["id"] for each in patient.http.get("/v1/models").json()["data"]}
    assert listed == {MODEL, ADAPTER}
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(patient.http.post, "/v1/completions", json=BODY | {"model": ADAPTER}, timeout=120)
        eventually(lambda: queued(patient) == 1, "the waiting request is not counted")
        without = group(engine.url)
        serve(patient, without, at_zero=False)
        eventually(lambda: patient.shown_groups(), "the group without it never came")
        serve(patient, without, group(engine.url, 1).model_copy(update={"adapters": (ADAPTER,)}), at_zero=False)
        answer = waits.result(120)
    assert answer.status_code == 200, answer.text
    assert [asked.adapter for asked in engine.requests] == [ADAPTER]


def test_a_request_that_nothing_is_started_for_is_told_so(hurried: RunningGateway) -> None:
    refused = hurried.http.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready"), refused.text
    assert "spec.replicas is 0" in refused.text
    assert "retry-after" in refused.headers
