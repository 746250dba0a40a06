"""A gateway asks engines of models with `network.tls` by HTTPS, and only those that are who they must be."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import CliRunner

from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from stageline_gateway.command import gateway as gateway_command
from stageline_gateway.settings import GatewaySettings

# httpx leaves a handshake open that is cancelled, as the gateway's end does.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
NAME = "m-stages.lab.svc"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}
TOKENIZED = (200, '{"token_ids": [5], "max_model_len": 99}')


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@contextmanager
def secure_engine(authority: trustme.CA, name: str = NAME) -> Iterator[ScriptedEngine]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    engine = ScriptedEngine(tls=context, replies={"POST /v1/tokenize": TOKENIZED})
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def settings(tmp_path: Path, authority: trustme.CA | None) -> GatewaySettings:
    path = tmp_path / "authority.pem"
    if authority is not None:
        authority.cert_pem.write_to_path(path)
    return GatewaySettings(
        tmp_path / "endpoints.json",
        probe_interval_seconds=0.05,
        hold_seconds=0,
        engine_authority=path if authority is not None else None,
    )


def refusal(gateway: RunningGateway, words: str) -> str:
    """What a client reads once a probe has found `words`."""
    eventually(lambda: words in gateway.http.post("/v1/completions", json=BODY).text, words)
    answered = gateway.http.post("/v1/completions", json=BODY)
    assert answered.status_code == 503, answered.text
    return answered.text


def test_answers_and_short_questions_go_by_https(tmp_path: Path, authority: trustme.CA) -> None:
    with secure_engine(authority) as engine, running_gateway(settings(tmp_path, authority)) as gateway:
        gateway.serve(group(engine.url, tls_name=NAME))
        answered = gateway.http.post("/v1/completions", json=BODY)
        assert (answered.status_code, answered.json()["choices"][0]["text"]) == (200, "Hello world"), answered.text
        assert gateway.http.post("/tokenize", json=BODY).json()["tokens"] == [5]


@pytest.mark.parametrize("case", ["another authority", "another model"])
def test_an_engine_that_is_not_who_it_must_be_is_asked_nothing(
    tmp_path: Path, authority: trustme.CA, case: str
) -> None:
    issuer, name = (trustme.CA(), NAME) if case == "another authority" else (authority, "other-stages.lab.svc")
    with secure_engine(issuer, name) as engine, running_gateway(settings(tmp_path, authority)) as gateway:
        gateway.serve(group(engine.url, tls_name=NAME))
        refusal(gateway, "its engine's certificate is not accepted")
        assert (engine.requests, engine.asked) == ([], [])


def test_without_an_authority_no_such_engine_is_asked(tmp_path: Path, authority: trustme.CA) -> None:
    with secure_engine(authority) as engine, running_gateway(settings(tmp_path, None)) as gateway:
        gateway.serve(group(engine.url, tls_name=NAME))
        refusal(gateway, "this gateway was given no --engine-authority")
        assert engine.num_probes == 0


def test_an_engine_in_clear_is_no_stand_in_for_one_by_tls(
    tmp_path: Path, authority: trustme.CA, engine: ScriptedEngine
) -> None:
    """It never answers a handshake, so the wait is all of what connecting may take."""
    hasty = replace(settings(tmp_path, authority), connect_timeout_seconds=1.0)
    with running_gateway(hasty) as gateway:
        gateway.serve(group(engine.url.replace("http://", "https://"), tls_name=NAME))
        answered = gateway.http.post("/v1/completions", json=BODY, timeout=150.0)
        assert answered.status_code >= 500, answered.text
        assert engine.requests == []


def test_a_further_authority_is_taken_up_and_a_broken_file_changes_nothing(
    tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    later = trustme.CA()
    path = tmp_path / "authority.pem"
    with secure_engine(later) as engine, running_gateway(settings(tmp_path, authority)) as gateway:
        gateway.serve(group(engine.url, tls_name=NAME))
        refusal(gateway, "its engine's certificate is not accepted")
        path.write_text("half a certif")
        eventually(lambda: "--engine-authority can't be read again" in caplog.text, "it says what is wrong")
        path.write_bytes(authority.cert_pem.bytes() + later.cert_pem.bytes())
        eventually(lambda: gateway.http.post("/v1/completions", json=BODY).status_code == 200, "it is trusted now")


@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("no PEM", "it holds no certificate in PEM form")])
def test_a_file_that_can_not_be_used_is_refused_at_the_start(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "authority.pem"
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(
        gateway_command, ["--endpoints", str(tmp_path / "e"), "--port", "0", "--engine-authority", str(path)]
    )
    assert done.exit_code != 0
    said = done.output + str(done.exception)
    assert f"--engine-authority {path} can't be used: {words}" in said
