"""An answer whose engine fails goes on elsewhere, and its client sees one unbroken stream.

The engines here are those of `continued_answers`: a repeated or missing token shows.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from chaos.continued_answers import LATE_CHARACTERS, TEXT, WORDS, Streamed, begun, read, rest_of
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway, write_endpoints
from processes.scripted_engine import Drop, Hold, Refuse, Say, ScriptedEngine, Step
from stageline_api.endpoints import Endpoints
from stageline_api.engine_http import (
    Admitted,
    Delta,
    EngineError,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
)
from stageline_api.health import Phase
from stageline_gateway import fleet
from stageline_gateway.settings import GatewaySettings

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x", "logprobs": 0, "max_tokens": 20}
STREAM = BODY | {"stream": True, "stream_options": {"include_usage": True}}
RESUMES = "stageline_gateway_resumes_total"


@pytest.fixture
def settings(tmp_path: Path) -> GatewaySettings:
    """Of a gateway that waits for groups, longer than a busy machine's engines are silent."""
    return GatewaySettings(
        endpoints_path=tmp_path / "endpoints.json",
        connect_timeout_seconds=60,
        probe_interval_seconds=0.05,
        probe_timeout_seconds=60,
        hold_seconds=60,
        resume_window_seconds=60,
        most_losses=4,
    )


@pytest.fixture
def patient(settings: GatewaySettings) -> Iterator[RunningGateway]:
    """Such a gateway."""
    with running_gateway(settings) as gateway:
        yield gateway


FAILURES: dict[str, Step] = {
    "drops": Drop(),
    "fails": Say(Failed(message="stage 1 died")),
    "aborts": Say(Finished(reason=FinishReason.ABORT, prompt_tokens=3, completion_tokens=0)),
}
AFTER = pytest.mark.parametrize("after", [1, 4, len(WORDS)])


@pytest.mark.parametrize("ending", FAILURES.values(), ids=FAILURES.keys())
@AFTER
def test_a_stream_goes_on_unbroken(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, ending: Step, after: int
) -> None:
    assert_goes_on_unbroken(patient, engine, other_engine, ending, after)


class ShortOnce:
    """A gateway's `EngineTimeouts` that is short for the first run alone.

    Were it so for all, a silence of a busy machine would end a run that is not counted here.
    """

    connect_seconds = idle_seconds = 60.0

    def __init__(self) -> None:
        self._runs = count()

    @property
    def stall_seconds(self) -> float:
        """Asked for once by each run."""
        return 60.0 if next(self._runs) else 1.0


@AFTER
def test_a_stream_whose_engine_stalls_goes_on_unbroken(
    settings: GatewaySettings,
    engine: ScriptedEngine,
    other_engine: ScriptedEngine,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "EngineTimeouts", lambda *_: ShortOnce())
    with running_gateway(settings) as gateway:
        assert_goes_on_unbroken(gateway, engine, other_engine, Hold(), after)


def assert_goes_on_unbroken(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, ending: Step, after: int
) -> None:
    """The first engine says so many tokens and then `ending`; the client sees one answer all the same."""
    engine.script = lambda request: rest_of(request, ending, after)
    other_engine.script = rest_of
    patient.serve(group(engine.url, 0), group(other_engine.url, 1))
    seen = read(patient.http.post("/v1/completions", json=STREAM).text)
    assert (seen.text, seen.errors, seen.finishes, seen.is_done) == (TEXT, [], ["stop"], True), seen
    assert seen.logprobs == [-index for index in range(len(WORDS))]
    assert seen.usage["completion_tokens"] == len(WORDS)
    assert seen.usage["prompt_tokens"] == 3
    assert (seen.comments, seen.usage["stageline_resumes"]) == (["resumed"], 1)
    [first], [second] = engine.requests, other_engine.requests
    assert second.sampling == first.sampling, "seed and limits are the first ones"
    assert second.generated_token_ids == tuple(range(after))
    assert second.generated_characters == max(0, len("".join(WORDS[:after])) - LATE_CHARACTERS)
    assert second.priority < first.priority
    assert patient.sample(RESUMES, model_name=MODEL, outcome="resumed") == 1


def test_text_that_was_relayed_behind_the_last_token_is_not_repeated(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    # Everything but Finished had been sent: the next engine has only the end to say.
    engine.script = lambda request: [*rest_of(request)[:-1], Drop()]
    other_engine.script = rest_of
    patient.serve(group(engine.url, 0), group(other_engine.url, 1))
    seen = read(patient.http.post("/v1/completions", json=STREAM).text)
    assert (seen.text, seen.errors, seen.finishes) == (TEXT, [], ["stop"])
    assert other_engine.requests[0].generated_characters == len(TEXT)


def test_a_whole_answer_says_so_in_a_header(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    engine.script = lambda request: rest_of(request, Drop(), 2)
    other_engine.script = rest_of
    patient.serve(group(engine.url, 0), group(other_engine.url, 1))
    answered = patient.http.post("/v1/completions", json=BODY)
    assert answered.json()["choices"][0]["text"] == TEXT
    assert answered.headers["x-stageline-resumed"] == "1"
    engine.script = rest_of
    assert "x-stageline-resumed" not in patient.http.post("/v1/completions", json=BODY).headers


def test_an_answer_survives_several_engines(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    def two_more(request: GenerateRequest) -> list[Step]:
        start = len(request.generated_token_ids)
        return rest_of(request, Drop(), start + 2) if start + 2 < len(WORDS) else rest_of(request)

    engine.script = other_engine.script = two_more
    patient.serve(group(engine.url, 0), group(other_engine.url, 1))
    seen = read(patient.http.post("/v1/completions", json=STREAM).text)
    assert (seen.text, seen.errors, seen.usage["stageline_resumes"]) == (TEXT, [], 4)


def test_each_choice_goes_on_by_itself(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    def first_run(request: GenerateRequest) -> list[Step]:
        return [*rest_of(request, Hold(), 3), Drop()] if request.sampling.choice == 1 else rest_of(request)

    engine.script, other_engine.script = first_run, rest_of
    patient.serve(group(engine.url, 0))
    with patient.http.stream("POST", "/v1/completions", json=BODY | {"n": 2, "stream": True}) as streaming:
        lines = streaming.iter_lines()
        eventually(lambda: 'finish_reason":"stop' in next(lines), "choice 0 did not finish")
        tokens = "stageline_generation_tokens_total"
        eventually(lambda: patient.sample(tokens, model_name=MODEL) == len(WORDS) + 3, "choice 1 did not begin")
        patient.serve(group(other_engine.url, 1))
        engine.release()
        texts = "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in lines
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["index"] == 1
        )
    assert TEXT.endswith(texts) or texts == TEXT
    [continued] = other_engine.requests
    assert continued.sampling.choice == 1
    assert continued.generated_token_ids == (0, 1, 2)


def test_another_revision_never_continues_an_answer(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    engine.script = lambda request: rest_of(request, Drop(), 2)
    other_engine.script = rest_of
    old = group(engine.url, 0).model_copy(update={"revision": "old"})
    patient.serve(old, group(other_engine.url, 1).model_copy(update={"revision": "new"}))
    tries: list[int] = []

    def second_time_lucky(request: GenerateRequest) -> list[Step]:
        tries.append(1)
        return rest_of(request, Drop(), 2) if len(tries) < 2 else rest_of(request)

    engine.script = second_time_lucky
    seen = read(patient.http.post("/v1/completions", json=STREAM).text)
    assert (seen.text, seen.errors) == (TEXT, [])
    assert len(engine.requests) == 2, "the same group, asked again"
    assert other_engine.requests == []


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_an_answer_that_outlives_its_revision_is_told_so(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine, stream: bool
) -> None:
    """A rollout under load: the last group of the old revision drains, and ends before the answer does."""
    engine.script, other_engine.script = (lambda request: rest_of(request, Hold(), 3)), rest_of
    settings = GatewaySettings(
        tmp_path / "rollout.json", resume_window_seconds=0.3, drain_patience_seconds=0, probe_interval_seconds=0.05
    )
    with running_gateway(settings) as gateway, ThreadPoolExecutor(1) as pool:
        old = group(engine.url, 0).model_copy(update={"revision": "old"})
        new = group(other_engine.url, 1).model_copy(update={"revision": "new"})
        gateway.serve(old)
        asked = pool.submit(gateway.http.post, "/v1/completions", json=STREAM if stream else BODY)
        tokens = "stageline_generation_tokens_total"
        eventually(lambda: gateway.sample(tokens, model_name=MODEL) == 3, "the answer never began")
        gateway.serve(old.model_copy(update={"ready": False, "draining": True}), new)
        assert read(gateway.http.post("/v1/completions", json=STREAM).text).text == TEXT, "the new revision answers"
        assert not asked.done(), "the drain lasts, and so does the answer"
        gateway.serve(new)
        engine.stop()
        answered = asked.result(60)
        if stream:
            seen = read(answered.text)
            assert (seen.text, seen.is_done) == ("In the beginni", False)
            [error] = seen.errors
        else:
            assert (answered.status_code, answered.headers["retry-after"]) == (503, "2")
            error = answered.json()["error"]
        assert error["code"] == "revision_replaced"
        assert "another revision" in error["message"]
        assert len(other_engine.requests) == 1, "the new revision was never handed the old one's tokens"


def test_what_was_only_queued_goes_to_any_revision(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=3)), Drop()]
    other_engine.script = rest_of
    patient.serve(
        group(engine.url, 0).model_copy(update={"revision": "old"}),
        group(other_engine.url, 1).model_copy(update={"revision": "new"}),
    )
    seen = read(patient.http.post("/v1/completions", json=STREAM).text)
    assert (seen.text, seen.errors, seen.comments) == (TEXT, [], [])
    assert "stageline_resumes" not in seen.usage, "nothing was continued"
    assert patient.sample(RESUMES, model_name=MODEL, outcome="moved") == 1


def test_a_group_that_comes_back_continues(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    engine.script = lambda request: rest_of(request, Hold(), 3)
    other_engine.script = rest_of
    patient.serve(group(engine.url, 0))
    with patient.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
        parts = streaming.iter_text()
        body = begun(parts)
        engine.stop()
        write_endpoints(patient.endpoints, group(engine.url, 0, ready=False, message="restarting"))
        write_endpoints(patient.endpoints, group(other_engine.url, 0))
        body += "".join(parts)
    seen = read(body)
    assert (seen.text, seen.errors) == (TEXT, []), seen


def short(tmp_path: Path) -> GatewaySettings:
    """A resume window of a fraction of a second."""
    return GatewaySettings(endpoints_path=tmp_path / "short.json", hold_seconds=0, resume_window_seconds=0.3)


def test_an_answer_that_can_not_be_continued_in_time_ends_with_an_error(tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.script = lambda request: rest_of(request, Drop(), 3)
    with running_gateway(short(tmp_path)) as gateway:
        gateway.serve(group(engine.url, 0))
        engine.script = lambda request: rest_of(request, Drop(), 3) if not request.generated_token_ids else [Drop()]
        seen = read(gateway.http.post("/v1/completions", json=STREAM).text)
        assert "within 0.3 s" in seen.errors[0]["message"], seen
        assert not seen.is_done
        assert gateway.sample(RESUMES, model_name=MODEL, outcome="expired") == 1


@pytest.mark.parametrize("window_seconds", [0.25, 0.0])
def test_each_model_has_a_resume_window_of_its_own(
    tmp_path: Path, engine: ScriptedEngine, window_seconds: float
) -> None:
    runs: list[int] = []

    def once(request: GenerateRequest) -> list[Step]:
        runs.append(1)
        return rest_of(request, Drop(), 3) if len(runs) == 1 else [Drop()]

    engine.script = once
    with running_gateway(GatewaySettings(tmp_path / "window.json")) as gateway:
        listed = group(engine.url, 0)
        gateway.serve(listed)
        windows = {MODEL: window_seconds, "another": 99.0}
        text = Endpoints(groups=(listed,), resume_window_seconds=windows).model_dump_json()
        gateway.endpoints.with_suffix(".new").write_text(text)
        gateway.endpoints.with_suffix(".new").replace(gateway.endpoints)

        def windows_in_force() -> Any:
            return gateway.admin.get("/status").json()["resume_window_seconds"]

        eventually(lambda: windows_in_force() == {MODEL: window_seconds}, windows_in_force)
        seen = read(gateway.http.post("/v1/completions", json=STREAM).text)
        assert f"within {window_seconds:g} s" in seen.errors[0]["message"], seen
        assert not seen.is_done


def test_a_request_that_kills_every_engine_is_given_up(patient: RunningGateway, engine: ScriptedEngine) -> None:
    def one_more(request: GenerateRequest) -> list[Step]:
        return [
            Say(Admitted(prompt_tokens=3)),
            Say(Delta(text="a", token_ids=(len(request.generated_token_ids),))),
            Drop(),
        ]

    engine.script = one_more
    patient.serve(group(engine.url, 0))
    seen = read(patient.http.post("/v1/completions", json=STREAM).text)
    assert seen.errors[0]["code"] == "engine_failed"
    assert len(engine.requests) == 5, "the first, and four times again"
    assert patient.sample(RESUMES, model_name=MODEL, outcome="exhausted") == 1


def test_an_engine_that_will_not_continue_is_said(
    patient: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    engine.script = lambda request: rest_of(request, Drop(), 3)
    refusal = EngineError(code=ErrorCode.INVALID_VALUE, message="too old", param="generated_token_ids")
    other_engine.script = lambda _: [Refuse(400, refusal)]
    patient.serve(group(engine.url, 0), group(other_engine.url, 1))
    seen = read(patient.http.post("/v1/completions", json=STREAM).text)
    assert "too old" in seen.errors[0]["message"]
    assert patient.sample(RESUMES, model_name=MODEL, outcome="refused") == 1


def test_a_new_request_waits_for_a_group_that_is_starting(patient: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = rest_of
    engine.phase = Phase.WARMING
    patient.serve(group(engine.url, 0))
    eventually(lambda: not patient.http.get("/readyz").is_success, "the probe did not see it")
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(patient.http.post, "/v1/completions", json=STREAM)
        waiting = {"model_name": MODEL}
        eventually(lambda: patient.sample("stageline_gateway_requests_in_flight", **waiting) == 1, "never arrived")
        assert not answered.done()
        engine.phase = Phase.READY
        assert read(answered.result().text).text == TEXT


def read_disturbed(gateway: RunningGateway, disturb: Callable[[], object]) -> Streamed:
    """A streamed answer that is disturbed once it was admitted."""
    with gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
        parts = streaming.iter_text()
        body = ""  # its status has come, so it was admitted
        disturb()
        return read(body + "".join(parts))


@AFTER
def test_no_comment_is_a_piece_of_the_body_by_itself(
    settings: GatewaySettings, engine: ScriptedEngine, other_engine: ScriptedEngine, after: int
) -> None:
    """`vllm bench serve` strips each piece that it reads, so a comment alone would join what follows, and hide it."""
    engine.script = lambda request: rest_of(request, Drop(), after)
    other_engine.script = rest_of
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
        with gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
            pieces = [piece.decode() for piece in streaming.iter_raw()]
    assert not [piece for piece in pieces if "data: " not in piece], pieces
    assert ": resumed" in "".join(pieces), pieces


def check_left(gateway: RunningGateway, seen: Streamed) -> None:
    """The answer is whole, and its engine was left rather than lost."""
    assert (seen.text, seen.errors) == (TEXT, []), seen
    assert gateway.sample("stageline_gateway_engine_losses_total", model_name=MODEL, kind="left") == 1


DRAINS: dict[str, Callable[[GenerateRequest], list[Step]]] = {
    "queued": lambda _: [Say(Admitted(prompt_tokens=3)), Hold()],
    "answering": lambda request: rest_of(request, Hold(), 3),
}


@pytest.mark.parametrize("script", DRAINS.values(), ids=DRAINS.keys())
def test_a_group_that_drains_too_long_is_left(
    tmp_path: Path,
    engine: ScriptedEngine,
    other_engine: ScriptedEngine,
    script: Callable[[GenerateRequest], list[Step]],
) -> None:
    settings = GatewaySettings(
        endpoints_path=tmp_path / "drain.json", probe_interval_seconds=0.05, drain_patience_seconds=0.2
    )
    engine.script, other_engine.script = script, rest_of

    def drain() -> None:
        old = group(engine.url, 0, ready=False, message="draining")
        listed = json.loads(gateway.endpoints.read_text())["groups"][0]
        draining = old.model_copy(update={"incarnation": listed["incarnation"], "draining": True})
        write_endpoints(gateway.endpoints, draining, group(other_engine.url, 1))

    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url, 0))
        check_left(gateway, read_disturbed(gateway, drain))
        assert gateway.sample("stageline_gateway_circuits_open", model_name=MODEL) == 0


@pytest.mark.parametrize("script", DRAINS.values(), ids=DRAINS.keys())
@pytest.mark.parametrize("listed_as_ready", [True, False])
def test_an_engine_that_was_asked_to_drain_itself_is_left_too(
    tmp_path: Path,
    engine: ScriptedEngine,
    other_engine: ScriptedEngine,
    script: Callable[[GenerateRequest], list[Step]],
    listed_as_ready: bool,
) -> None:
    """`POST /v1/drain` of an engine: discovery says nothing of it, or only that its pod is not ready any more."""
    settings = GatewaySettings(
        tmp_path / "own.json", probe_interval_seconds=0.05, probe_timeout_seconds=60, drain_patience_seconds=0.2
    )
    engine.script, other_engine.script = script, rest_of

    def drain() -> None:
        engine.phase = Phase.DRAINING
        [listed] = Endpoints.model_validate_json(gateway.endpoints.read_text()).groups
        listed = listed.model_copy(update={"ready": listed_as_ready})
        write_endpoints(gateway.endpoints, listed, group(other_engine.url, 1))

    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url, 0))
        check_left(gateway, read_disturbed(gateway, drain))
        [shown] = gateway.http.get("/v1/models").json()["data"]
        assert [(one["ready"], one["draining"]) for one in shown["groups"]] == [(False, True), (True, False)]


def test_a_silent_engine_that_discovery_calls_gone_is_left(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    engine.script, other_engine.script = (lambda request: rest_of(request, Hold(), 3)), rest_of
    settings = GatewaySettings(endpoints_path=tmp_path / "gone.json", probe_interval_seconds=0.05)
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url, 0))
        seen = read_disturbed(gateway, lambda: write_endpoints(gateway.endpoints, group(other_engine.url, 0)))
        assert (seen.text, seen.errors) == (TEXT, []), seen
        assert gateway.sample("stageline_gateway_engine_losses_total", model_name=MODEL, kind="gone") == 1


def test_what_ran_on_an_engine_whose_address_is_another_s_by_now_goes_on_elsewhere(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    """The old engine's machine vanished, and with it whoever could have broken the connection."""
    engine.script, other_engine.script = (lambda request: rest_of(request, Hold(), 3)), rest_of
    settings = GatewaySettings(tmp_path / "another.json", probe_interval_seconds=0.05, probe_timeout_seconds=60)
    with running_gateway(settings) as gateway:
        listed = group(engine.url, 0)
        gateway.serve(listed)

        def replace() -> None:
            engine.incarnation = listed.incarnation + 1
            write_endpoints(gateway.endpoints, listed, group(other_engine.url, 1))

        seen = read_disturbed(gateway, replace)
        assert (seen.text, seen.errors) == (TEXT, []), seen
        assert gateway.sample("stageline_gateway_engine_losses_total", model_name=MODEL, kind="gone") == 1


def test_an_engine_that_is_silent_to_its_probe_too_is_left_before_it_counts_as_stalled(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    engine.script, other_engine.script = (lambda request: rest_of(request, Hold(), 3)), rest_of
    settings = GatewaySettings(
        endpoints_path=tmp_path / "silent.json",
        probe_interval_seconds=0.05,
        probe_timeout_seconds=0.3,
        stall_timeout_seconds=60,
    )
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url, 0))
        with gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
            parts = streaming.iter_text()
            body = ""  # its status has come, so it was admitted
            engine.answers_probes = False
            [listed] = Endpoints.model_validate_json(gateway.endpoints.read_text()).groups
            write_endpoints(gateway.endpoints, listed, group(other_engine.url, 1))
            body += "".join(parts)
        seen = read(body)
        assert (seen.text, seen.errors) == (TEXT, []), seen
        assert gateway.sample("stageline_gateway_engine_losses_total", model_name=MODEL, kind="stalled") == 1
