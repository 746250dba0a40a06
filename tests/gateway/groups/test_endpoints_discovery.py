"""The endpoints file decides what is served; a bad version of it never takes down what works."""

import time
from pathlib import Path
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway, write_endpoints
from processes.scripted_engine import ScriptedEngine
from stageline_gateway.settings import GatewaySettings

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}
STALE = "stageline_gateway_endpoints_stale"
AGE = "stageline_gateway_discovery_age_seconds"


def replace_whole(path: Path, content: bytes) -> None:
    """At once: a look at a file that is only half written would be one more malformed version."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    temporary.replace(path)


def test_groups_come_go_and_change(
    gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    other_engine.served_name = "other"
    gateway.serve(group(other_engine.url, model="other"))
    assert gateway.http.post("/v1/completions", json=BODY).status_code == 404
    assert gateway.http.post("/v1/completions", json=BODY | {"model": "other"}).status_code == 200
    gateway.serve(group(engine.url), group(other_engine.url, model="other", ready=False, message="backing off"))
    assert gateway.http.post("/v1/completions", json=BODY).status_code == 200
    refused = gateway.http.post("/v1/completions", json=BODY | {"model": "other"})
    assert refused.status_code == 503
    assert "group 0: backing off" in refused.json()["error"]["message"]


def test_an_adapter_is_a_model_of_its_own_that_its_groups_answer_for(
    gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    with_adapter = group(other_engine.url, 1).model_copy(update={"adapters": ("pirate", "other")})
    other_engine.served_name = "other"
    write_endpoints(gateway.endpoints, group(engine.url), with_adapter.model_copy(update={"model": "other"}))
    eventually(lambda: "pirate" in str(gateway.http.get("/v1/models").json()), "the adapter is not listed")
    assert gateway.http.post("/v1/completions", json=BODY | {"model": "pirate"}).status_code == 200
    # A model that is served under a name keeps it.
    assert gateway.http.post("/v1/completions", json=BODY | {"model": "other"}).status_code == 200
    assert [asked.adapter for asked in other_engine.requests] == ["pirate", None]
    refused = gateway.http.post("/v1/completions", json=BODY | {"model": "parrot"})
    assert refused.status_code == 404
    assert engine.requests == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"groups": [{"model": "x"}]}', b'{"groups": [], "more": 1}', b"\xff\xfe", b"[]"],
    ids=ascii,
)
def test_a_malformed_file_keeps_the_last_good_version(
    gateway: RunningGateway, engine: ScriptedEngine, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    replace_whole(gateway.endpoints, content)
    eventually(lambda: gateway.sample(STALE) == 1, "the metric never said so")
    assert gateway.http.post("/v1/completions", json=BODY).status_code == 200
    warnings = [record for record in caplog.records if "malformed" in record.message]
    assert len(warnings) == 1, "said once, not at every look"
    gateway.serve(group(engine.url, message="back"))
    assert gateway.sample(STALE) == 0


def test_a_file_that_vanishes_keeps_the_last_good_version(gateway: RunningGateway) -> None:
    gateway.endpoints.unlink()
    eventually(lambda: gateway.sample(STALE) == 1, "the metric never said so")
    assert gateway.http.post("/v1/completions", json=BODY).status_code == 200
    eventually(lambda: gateway.sample(AGE) > 0.5, "its age does not grow")


@pytest.mark.parametrize("content", [None, b"{"], ids=["unchanged", "malformed"])
def test_the_age_of_what_is_served_grows_only_while_it_can_not_be_confirmed(
    gateway: RunningGateway, content: bytes | None
) -> None:
    began = time.monotonic()
    if content is not None:
        replace_whole(gateway.endpoints, content)
        eventually(lambda: gateway.sample(AGE) > 0.7, "a version that can't be used confirms nothing")
        return
    eventually(
        lambda: time.monotonic() - began > 1.5 and gateway.sample(AGE) < 1, "a file that is as it was is no news"
    )


def test_a_gateway_may_start_before_its_file(tmp_path: Path, engine: ScriptedEngine) -> None:
    path = tmp_path / "later.json"
    with running_gateway(GatewaySettings(path, probe_timeout_seconds=60, hold_seconds=0)) as gateway:
        assert gateway.http.get("/healthz").status_code == 200
        assert gateway.http.get("/readyz").status_code == 503
        assert gateway.admin.get("/accepting").status_code == 503
        assert gateway.http.get("/v1/models").json()["data"] == []
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 503
        gateway.serve(group(engine.url))
        assert gateway.http.get("/readyz").status_code == 200
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 200


def test_readiness_gives_the_reason(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    gateway.serve(group(engine.url, ready=False, message="stage 1 is loading"))
    answered = gateway.admin.get("/readyz")
    assert answered.status_code == 503
    assert "stage 1 is loading" in answered.json()["message"]
    assert gateway.admin.get("/accepting").json() == {"accepting": True, "message": ""}, "requests wait here"
    write_endpoints(gateway.endpoints)
    eventually(lambda: "lists no group" in gateway.admin.get("/readyz").text, lambda: gateway.admin.get("/readyz").text)
