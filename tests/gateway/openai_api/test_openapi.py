"""The OpenAPI document says what the gateway does: schemathesis asks it everything the document allows, and more."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos import fuzz_effort
from processes.gateway_harness import MODEL, RunningGateway, running_gateway
from processes.scripted_engine import ScriptedEngine
from stageline_api.endpoints import GroupEndpoint
from stageline_gateway.endpoints.openapi import document
from stageline_gateway.settings import GatewaySettings

EXAMPLES = 25 * fuzz_effort.FACTOR
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@pytest.fixture
def gateway(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """A gateway whose engine answers everything, so that only the gateway can be at fault."""
    stage = {"stage": 0, "health_url": engine.url, "host": "a"}
    stages = {"served_name": MODEL, "stage_count": 1, "incarnation": 7, "stages": [stage]}
    page: dict[str, Any] = {
        "stage": 0,
        "stage_count": 1,
        "incarnation": 7,
        "oldest_seq": None,
        "more": False,
        "steps": [],
    }
    page |= {"open_marks": [["idle", "", 0]], "now_nanoseconds": 10**9}
    engine.replies |= {
        "POST /v1/tokenize": (200, '{"token_ids": [5], "max_model_len": 99}'),
        "POST /v1/detokenize": (200, '{"text": "x"}'),
        "GET /stages": (200, json.dumps(stages)),
        "GET /clock": (200, '{"stages": []}'),
        "GET /timeline": (200, json.dumps(page)),
    }
    # A request for 128 choices opens as many connections at once; a busy machine must not look like a broken engine.
    patient = GatewaySettings(tmp_path / "endpoints.json", connect_timeout_seconds=30, probe_timeout_seconds=30)
    with running_gateway(patient) as gateway:
        gateway.serve(GroupEndpoint(model=MODEL, group=0, incarnation=7, url=engine.url, ready=True))
        yield gateway


def about_one_model(described: Any) -> Any:
    """The document with one name allowed for a model, so that requests get past looking it up."""
    for schema in described["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": MODEL}
    for path in described["paths"].values():
        for parameter in path.get("get", {}).get("parameters", []):
            if parameter["name"] == "model":
                parameter["schema"] = {"const": MODEL}
    return described


REFUSALS = """
[checks.negative_data_rejection]
# More items than a list may have can be more bytes than a body may have, which is seen first.
expected-statuses = [400, 401, 403, 404, 405, 406, 413, 415, 422, 428]
"""


@pytest.mark.thorough
@pytest.mark.timeout(1200 * fuzz_effort.FACTOR)
def test_schemathesis_finds_nothing(gateway: RunningGateway, engine: ScriptedEngine, tmp_path: Path) -> None:
    asked = tmp_path / "openapi.json"
    asked.write_text(json.dumps(about_one_model(gateway.http.get("/openapi.json").json())))
    (tmp_path / "schemathesis.toml").write_text(REFUSALS)
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", str(asked), "--url", gateway.url),
        *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
        *(
            "--max-examples",
            str(EXAMPLES),
            "--seed",
            str(fuzz_effort.SEED),
            "--request-timeout",
            "60",
            "--suppress-health-check",
            "all",
        ),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100 * fuzz_effort.FACTOR, cwd=tmp_path)
    failures = done.stdout.partition("= FAILURES =")[2]
    told = [line if len(line) < 400 else line[:400] + "…" for line in failures.splitlines()]
    assert done.returncode == 0, "\n".join([*told, done.stdout[-3000:], done.stderr[-2000:]])
    # Also of what the engine was asked: requests did get past the checks.
    assert len(engine.requests) > 20, done.stdout[-3000:]


def test_the_document_names_every_public_route(gateway: RunningGateway) -> None:
    from stageline_gateway.app import build_app

    app = build_app(GatewaySettings(Path("absent.json")))
    routes = {route.path.replace(":path", "") for route in app.routes if hasattr(route, "path")}
    files = {"/", "/page.css", "/page.js", "/openapi.json"}
    assert routes - files == set(document()["paths"])
    assert gateway.http.get("/openapi.json").json() == document()
