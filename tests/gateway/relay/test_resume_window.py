"""The resume window counts from when a request last ran anywhere, so that each loss has a window of its own."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chaos.continued_answers import TEXT, read, rest_of
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway, write_endpoints
from processes.scripted_engine import Drop, Hold, Say, ScriptedEngine, Step
from stageline_api.endpoints import Endpoints
from stageline_api.engine_http import Admitted, Delta, GenerateRequest, SamplingParams, TextPrompt
from stageline_gateway import fleet
from stageline_gateway.errors import ApiError, not_ready
from stageline_gateway.groups.backends import Backends, DiscoveredGroups
from stageline_gateway.groups.routing import Wish
from stageline_gateway.relay.placement import Progress, RetryPolicy, Search
from stageline_gateway.settings import GatewaySettings

STREAM: dict[str, Any] = {"model": MODEL, "prompt": "x", "logprobs": 0, "max_tokens": 20, "stream": True}
WINDOW_SECONDS = 60.0
TICK_SECONDS = 2.0


class TickingClock:
    """Goes on a little whenever it is read, and further when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += TICK_SECONDS
        return self.seconds


class JumpingClock:
    """The time, and what a test has added to it."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> JumpingClock:
    """What gateways measure their windows by: a test lets one pass, and no slow machine does."""
    clock = JumpingClock()
    monkeypatch.setattr(fleet, "Backends", partial(Backends, clock=clock))
    return clock


class Searching:
    """A request of one group, on a clock of its own."""

    def __init__(self) -> None:
        self.clock = TickingClock()
        self.group = group("http://127.0.0.1:1")
        backends = Backends(DiscoveredGroups("a test"), clock=self.clock)
        endpoints = Endpoints(groups=(self.group,))
        backends.discovered.accept(endpoints)
        backends.take(endpoints)
        request = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"), sampling=SamplingParams())
        self.progress = Progress(request)
        self.search = Search(backends, MODEL, self.progress, Wish(), RetryPolicy(resume_window_seconds=WINDOW_SECONDS))

    def lost(self) -> None:
        """The group fails it."""
        self.search.failed(self.group, not_ready("gone", 1.0), True)

    def is_tried_again(self) -> bool:
        """Whether a group is found in time, with the only one at rest at first."""
        try:
            return asyncio.run(self.search.next_group()) == self.group
        except ApiError:
            return False


@pytest.mark.parametrize("has_output", [False, True])
def test_an_admission_begins_a_new_window(has_output: bool) -> None:
    searching = Searching()
    searching.progress.take(Admitted(prompt_tokens=3), "")
    if has_output:
        searching.progress.take(Delta(text="a", token_ids=(1,)), "")
    searching.lost()
    searching.clock.seconds += WINDOW_SECONDS / 2
    assert searching.is_tried_again()
    searching.progress.take(Admitted(prompt_tokens=3), "")
    searching.clock.seconds += WINDOW_SECONDS
    searching.lost()
    assert searching.is_tried_again(), "the second loss is over a window after the first"


def test_what_is_not_admitted_again_begins_no_new_window() -> None:
    searching = Searching()
    searching.progress.take(Admitted(prompt_tokens=3), "")
    searching.lost()
    searching.clock.seconds += WINDOW_SECONDS / 2
    searching.lost()
    searching.clock.seconds += WINDOW_SECONDS / 2
    searching.lost()
    assert not searching.is_tried_again()


def test_a_group_that_failed_is_not_tried_again_after_the_window() -> None:
    searching = Searching()
    searching.progress.take(Admitted(prompt_tokens=3), "")
    searching.lost()
    searching.clock.seconds += WINDOW_SECONDS
    assert not searching.is_tried_again(), "by then it has rested for long enough"


FIRST_RUNS: dict[str, Callable[[GenerateRequest], list[Step]]] = {
    "queued": lambda _: [Say(Admitted(prompt_tokens=3)), Drop()],
    "answering": lambda request: rest_of(request, Drop(), 3),
}


@pytest.mark.parametrize("first_run", FIRST_RUNS.values(), ids=FIRST_RUNS.keys())
def test_a_second_loss_after_a_long_wait_on_the_next_engine_is_survived(
    tmp_path: Path,
    engine: ScriptedEngine,
    clock: JumpingClock,
    first_run: Callable[[GenerateRequest], list[Step]],
) -> None:
    def script(request: GenerateRequest) -> list[Step]:
        match len(engine.requests):
            case 1:
                return first_run(request)
            case 2:
                return [Say(Admitted(prompt_tokens=3)), Hold(), Drop()]
            case _:
                return rest_of(request)

    engine.script = script
    settings = GatewaySettings(tmp_path / "endpoints.json", resume_window_seconds=WINDOW_SECONDS)
    with running_gateway(settings) as gateway, ThreadPoolExecutor(1) as pool:
        gateway.serve(group(engine.url))
        asked = pool.submit(gateway.http.post, "/v1/completions", json=STREAM)
        eventually(lambda: len(engine.requests) == 2, lambda: f"{len(engine.requests)} runs of two")
        clock.ahead_seconds += 2 * WINDOW_SECONDS
        engine.release()
        seen = read(asked.result().text)
    assert (seen.text, seen.errors, seen.is_done) == (TEXT, [], True), (seen, len(engine.requests))
    assert len(engine.requests) == 3


def unreachable(tmp_path: Path, window_seconds: float) -> GatewaySettings:
    """No probe tells that the group can't be reached, and one engine may be lost: the first."""
    return GatewaySettings(
        tmp_path / "endpoints.json", probe_interval_seconds=600, resume_window_seconds=window_seconds, most_losses=1
    )


def tries(gateway: RunningGateway) -> float:
    """How often the group could not be reached."""
    return gateway.sample("stageline_gateway_engine_losses_total", model_name=MODEL, kind="unreachable")


@pytest.mark.parametrize("first_run", FIRST_RUNS.values(), ids=FIRST_RUNS.keys())
def test_a_group_that_can_not_be_reached_is_waited_for_however_often_it_was_tried(
    tmp_path: Path,
    engine: ScriptedEngine,
    other_engine: ScriptedEngine,
    first_run: Callable[[GenerateRequest], list[Step]],
) -> None:
    engine.script, other_engine.script = (lambda request: [*first_run(request)[:-1], Hold(), Drop()]), rest_of
    with running_gateway(unreachable(tmp_path, window_seconds=600)) as gateway, ThreadPoolExecutor(1) as pool:
        gateway.serve(group(engine.url))
        asked = pool.submit(gateway.http.post, "/v1/completions", json=STREAM, timeout=240)
        admitted = "stageline_prompt_tokens_total"
        eventually(lambda: gateway.sample(admitted, model_name=MODEL) == 3, "the request never came")
        engine.stop()
        eventually(lambda: tries(gateway) >= 2, lambda: f"tried {tries(gateway)} times")
        assert not asked.done(), asked.result().text
        write_endpoints(gateway.endpoints, group(other_engine.url))
        seen = read(asked.result(60).text)
    assert (seen.text, seen.errors, seen.is_done) == (TEXT, [], True), seen


def test_a_group_that_can_not_be_reached_is_given_up_with_the_window(
    tmp_path: Path, engine: ScriptedEngine, clock: JumpingClock
) -> None:
    engine.script = lambda request: rest_of(request, Hold(), 3)
    with running_gateway(unreachable(tmp_path, WINDOW_SECONDS)) as gateway, ThreadPoolExecutor(1) as pool:
        gateway.serve(group(engine.url))
        asked = pool.submit(gateway.http.post, "/v1/completions", json=STREAM, timeout=240)
        tokens = "stageline_generation_tokens_total"
        eventually(lambda: gateway.sample(tokens, model_name=MODEL) == 3, "the answer never began")
        engine.stop()
        eventually(lambda: tries(gateway) >= 1, "never tried again")
        assert not asked.done(), asked.result().text
        clock.ahead_seconds += WINDOW_SECONDS
        seen = read(asked.result(60).text)
        [error] = seen.errors
        assert ("can't be reached" in error["message"], "within 60 s" in error["message"]) == (True, True), error
        assert gateway.sample("stageline_gateway_resumes_total", model_name=MODEL, outcome="expired") == 1
