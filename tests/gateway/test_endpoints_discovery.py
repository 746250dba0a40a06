"""The endpoints file decides what is served; a bad version of it never takes down what works."""

from pathlib import Path
from typing import Any

import pytest

from gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway, write_endpoints
from scripted_engine import ScriptedEngine
from stageline_gateway.settings import GatewaySettings

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}
STALE = "stageline_gateway_endpoints_stale"


def test_groups_come_go_and_change(
    gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    gateway.serve(group(other_engine.url, model="other"))
    assert gateway.http.post("/v1/completions", json=BODY).status_code == 404
    assert gateway.http.post("/v1/completions", json=BODY | {"model": "other"}).status_code == 200
    gateway.serve(group(engine.url), group(other_engine.url, model="other", ready=False, message="backing off"))
    assert gateway.http.post("/v1/completions", json=BODY).status_code == 200
    refused = gateway.http.post("/v1/completions", json=BODY | {"model": "other"})
    assert refused.status_code == 503
    assert "group 0: backing off" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"groups": [{"model": "x"}]}', b'{"groups": [], "more": 1}', b"\xff\xfe", b"[]"],
    ids=ascii,
)
def test_a_malformed_file_keeps_the_last_good_version(
    gateway: RunningGateway, engine: ScriptedEngine, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.endpoints.write_bytes(content)
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


def test_a_gateway_may_start_before_its_file(tmp_path: Path, engine: ScriptedEngine) -> None:
    path = tmp_path / "later.json"
    with running_gateway(GatewaySettings(endpoints_path=path)) as gateway:
        assert gateway.http.get("/healthz").status_code == 200
        assert gateway.http.get("/readyz").status_code == 503
        assert gateway.http.get("/v1/models").json()["data"] == []
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 503
        gateway.serve(group(engine.url))
        assert gateway.http.get("/readyz").status_code == 200
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 200


def test_readiness_gives_the_reason(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    gateway.serve(group(engine.url, ready=False, message="stage 1 is loading"))
    answered = gateway.http.get("/readyz")
    assert answered.status_code == 503
    assert "stage 1 is loading" in answered.json()["message"]
    write_endpoints(gateway.endpoints)
    eventually(lambda: "lists no group" in gateway.http.get("/readyz").text, lambda: gateway.http.get("/readyz").text)
