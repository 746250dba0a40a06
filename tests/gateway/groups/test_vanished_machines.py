"""A machine that vanished breaks no connection and refuses none: it is out of use within one probe period all the same.

A machine that is only busy looks like that for a while. Nothing is lost then either: what runs there goes on there.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chaos.black_hole import BlackHole, black_hole
from chaos.continued_answers import TEXT, begun, read, rest_of
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway, write_endpoints
from processes.scripted_engine import Hold, KeepSaying, Say, ScriptedEngine
from stageline_api.endpoints import Endpoints
from stageline_api.engine_http import Admitted, Delta
from stageline_gateway.groups.backends import SILENT
from stageline_gateway.settings import GatewaySettings

INTERVAL_SECONDS = 0.5
PERIOD_SECONDS = 2 * INTERVAL_SECONDS
LATE_SECONDS = 2.0
"""How late a busy machine may be in running the gateway's timers."""
BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}
STREAM = BODY | {"stream": True}
TOKENS = KeepSaying(Delta(text="a", token_ids=(1,)), pause_seconds=0.05)


@pytest.fixture
def machine(engine: ScriptedEngine) -> Iterator[BlackHole]:
    """The machine of `engine`."""
    with black_hole(engine.url) as machine:
        yield machine


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    """A gateway with a probe period of one second."""
    settings = GatewaySettings(
        tmp_path / "endpoints.json",
        probe_interval_seconds=INTERVAL_SECONDS,
        probe_timeout_seconds=INTERVAL_SECONDS,
        stall_timeout_seconds=120,
        hold_seconds=120,
    )
    with running_gateway(settings) as gateway:
        yield gateway


def is_silent(gateway: RunningGateway, index: int = 0) -> bool:
    """Whether the gateway says so of a group."""
    [listed] = gateway.http.get("/v1/models").json()["data"]
    return any(one["group"] == index and SILENT in one["message"] for one in listed["groups"])


def also_serve(gateway: RunningGateway, url: str) -> None:
    """List another group, beside the one that is listed."""
    [listed] = Endpoints.model_validate_json(gateway.endpoints.read_text()).groups
    write_endpoints(gateway.endpoints, listed, group(url, 1))


def losses(gateway: RunningGateway, kind: str) -> float:
    return gateway.sample("stageline_gateway_engine_losses_total", model_name=MODEL, kind=kind)


def test_no_request_goes_to_a_vanished_machine_after_a_probe_period(
    gateway: RunningGateway, machine: BlackHole, other_engine: ScriptedEngine
) -> None:
    gateway.serve(group(machine.url, 0), group(other_engine.url, 1))
    with ThreadPoolExecutor(1) as pool:
        stop: list[bool] = []

        def keep_asking() -> set[int]:
            statuses = set()
            while not stop:
                statuses.add(gateway.http.post("/v1/completions", json=BODY).status_code)
            return statuses

        asking = pool.submit(keep_asking)
        eventually(lambda: machine.opened_at, "never asked")
        vanished_at = machine.swallow()
        eventually(lambda: is_silent(gateway), "never called silent")
        before = gateway.sample("stageline_gateway_requests_total", model_name=MODEL, code="200")
        eventually(
            lambda: gateway.sample("stageline_gateway_requests_total", model_name=MODEL, code="200") > before + 20,
            "the other group does not answer",
        )
        stop.append(True)
        assert asking.result(120) == {200}, "what had gone there was moved"
    # Probes go on asking; a request's connection is one more than they open in an interval.
    late = [at - vanished_at for at in machine.opened_at if at > vanished_at + PERIOD_SECONDS + LATE_SECONDS]
    assert len(late) <= 1 + (time.monotonic() - vanished_at) / INTERVAL_SECONDS, late


def test_the_only_group_takes_nothing_while_it_is_silent_and_goes_on_when_it_is_back(
    gateway: RunningGateway, engine: ScriptedEngine, machine: BlackHole
) -> None:
    gateway.serve(group(machine.url))
    machine.swallow()
    eventually(lambda: is_silent(gateway), "never called silent")
    assert gateway.http.get("/readyz").status_code == 503
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gateway.http.post, "/v1/completions", json=BODY, timeout=240)
        in_flight = "stageline_gateway_requests_in_flight"
        eventually(lambda: gateway.sample(in_flight, model_name=MODEL) == 1, "the request never came")
        opened = len(machine.opened_at)
        eventually(lambda: len(machine.opened_at) >= opened + 2, "it is not probed any more")
        assert not engine.requests, "a request was sent into the void"
        assert not waiting.done()
        machine.restore()
        assert waiting.result(60).status_code == 200


@pytest.mark.parametrize("tokens", [0, 3], ids=["queued", "in mid-answer"])
def test_what_runs_on_a_vanished_machine_goes_on_elsewhere(
    gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, machine: BlackHole, tokens: int
) -> None:
    engine.script = lambda request: rest_of(request, Hold(), tokens)
    other_engine.script = rest_of
    gateway.serve(group(machine.url))
    with gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
        parts = streaming.iter_text()
        body = begun(parts) if tokens else ""  # its status has come, so it was admitted
        machine.swallow()
        also_serve(gateway, other_engine.url)
        body += "".join(parts)
    seen = read(body)
    assert (seen.text, seen.errors, seen.is_done) == (TEXT, [], True), seen
    assert losses(gateway, "stalled") == 1
    assert ("resumed" in seen.comments) == bool(tokens)


def test_an_answer_of_the_only_group_survives_a_pause_of_its_machine(
    gateway: RunningGateway, engine: ScriptedEngine, machine: BlackHole
) -> None:
    engine.script = lambda request: [*rest_of(request, Hold(), 3), *rest_of(request)[4:]]
    gateway.serve(group(machine.url))
    with gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
        parts = streaming.iter_text()
        body = ""  # its status has come, so it was admitted
        machine.swallow()
        eventually(lambda: is_silent(gateway), "never called silent")
        engine.release()
        machine.restore()
        body += "".join(parts)
    seen = read(body)
    assert (seen.text, seen.errors, seen.comments) == (TEXT, [], []), "the same run, to its end"
    assert losses(gateway, "stalled") == 0


def test_an_engine_too_busy_for_probes_is_alive_as_long_as_it_sends_tokens(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), TOKENS, Hold()]
    gateway.serve(group(engine.url))
    with gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
        parts = streaming.iter_text()
        begun(parts)
        engine.answers_probes = False
        probes = engine.probes
        eventually(lambda: engine.probes >= probes + 3, "not probed")
        # Once called silent it would stay so, as no probe is answered. A busy machine's tokens may come late once.
        eventually(lambda: gateway.http.get("/readyz").status_code == 200, "tokens come, so it is there")
        engine.hush()
        eventually(lambda: is_silent(gateway), "now that nothing comes it must be called silent")
