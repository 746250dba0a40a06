"""How many of the project's files a chat request runs before its computation begins, and how that is counted."""

import json
import subprocess
import sys

import pytest

from processes.call_recorder import Function, Record
from processes.recorded_requests import ENGINE, GATEWAY, STAGE_0, RecordedRequests, Records
from processes.repository_files import ROOT
from processes.request_path import EMBEDDING, RequestPath, package_crossings, path_of

MOST_FILES_ON_THE_WAY_IN = 59
"""From the request's arrival at the gateway to stage 0's first embedding; without rooms there were 74.

`core_life` and `output_text` are what our own runtime and vLLM share of an engine's core; `engine_access` is the key
that engines ask for; `served_models` says which namespace's model a name means, and the gateway's `metrics` whose
requests are counted; `accounts` count limits over a gateway's workers, `body_sizes` what bodies take of them.
`direct_routes`, `client_stream`, `connection_pool` and `written_pieces` make a request cost the gateway less.
`generation` and `answer_lines` are what a request by itself and a stream among many share at an engine,
`incoming_lines` at the gateway; `multiplexed` and `event_reader` there let many share one connection, whose lines
`multiplexing` knows. `answer_shapes` and `json_answers` are the way out's, which is made ready while the engine
computes.
"""

MAIN, HTTP, BUS, LAYERS = (
    Function(file, name)
    for file, name in (
        ("operator/stageline_cli/main.py", "main"),
        ("runtime/stageline_gateway/__init__.py", "answer"),
        ("runtime/stageline_gateway/__main__.py", "relay"),
        ("runtime/stageline_runtime/__init__.py", f"Model.{EMBEDDING}"),
    )
)
CLOCK = Function("operator/stageline_cli/__init__.py", "tick")


@pytest.mark.thorough
def test_the_way_in_has_not_grown() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "request-path"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout)
    listed = "\n".join(f"{used['lines']:5}  {used['file']}: {used['function']}" for used in path["way_in"])
    used_by = {process for used in path["way_in"] for process in used["processes"]}
    assert used_by == {GATEWAY, ENGINE, STAGE_0}, listed
    assert len(path["way_in"]) <= MOST_FILES_ON_THE_WAY_IN, (
        f"{len(path['way_in'])} files before the first embedding, {MOST_FILES_ON_THE_WAY_IN} at most:\n{listed}"
    )


def request(gateway: Record, embedding: int = 50) -> Records:
    return {GATEWAY: gateway, ENGINE: {}, STAGE_0: {(LAYERS, MAIN): embedding}}


def path(*requests: Records, pause: Record | None = None) -> RequestPath:
    return path_of(RecordedRequests(requests, {GATEWAY: pause or {}, ENGINE: {}, STAGE_0: {}}))


def ways(found: RequestPath) -> tuple[list[str], list[str]]:
    return [used.file for used in found.way_in], [used.file for used in found.way_back]


def test_files_stand_in_order_of_first_use_around_the_embedding() -> None:
    found = path(request({(BUS, MAIN): 60, (HTTP, MAIN): 10}))
    assert ways(found) == ([HTTP.file, LAYERS.file], [BUS.file])
    assert [used.processes for used in found.way_in] == [(GATEWAY,), (STAGE_0,)]
    assert package_crossings(found.way_in) == 1


def test_what_also_runs_while_nobody_asks_is_left_out() -> None:
    found = path(request({(CLOCK, MAIN): 5, (HTTP, MAIN): 10}), pause={(CLOCK, MAIN): 1})
    assert ways(found) == ([HTTP.file, LAYERS.file], [])
    assert found.background == (CLOCK.file,)


def test_the_same_function_counts_when_the_request_calls_it() -> None:
    found = path(request({(HTTP, MAIN): 10, (CLOCK, HTTP, MAIN): 12}), pause={(CLOCK, MAIN): 1})
    assert ways(found) == ([HTTP.file, CLOCK.file, LAYERS.file], [])


def test_a_loop_counts_when_it_goes_on_to_the_request() -> None:
    """Its first round in a record may have been an idle one; callers that never came anew are no part of the path."""
    found = path(request({(CLOCK, MAIN): 5, (HTTP, CLOCK, MAIN): 20}), pause={(CLOCK, MAIN): 1})
    assert ways(found) == ([CLOCK.file, HTTP.file, LAYERS.file], [])
    assert found.way_in[0].milliseconds == found.way_in[1].milliseconds


def test_what_only_some_requests_use_is_left_out() -> None:
    found = path(request({(HTTP, MAIN): 10, (BUS, MAIN): 11}), request({(HTTP, MAIN): 110}, embedding=150))
    assert ways(found) == ([HTTP.file, LAYERS.file], [])
    assert found.not_always == (BUS.file,)


def test_what_races_with_the_embedding_is_on_the_way_back() -> None:
    """Even where it mostly comes first, and so stands before the embedding in the order of first use."""
    requests = [request({(HTTP, MAIN): 10, (BUS, MAIN): at}) for at in (30, 40, 51)]
    assert ways(path(*requests)) == ([HTTP.file, LAYERS.file], [BUS.file])
