"""The picture's columns are the stages' own marks: nothing added, nothing lost, whatever the window."""

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes.gateway_harness import MODEL, RunningGateway, eventually, running_gateway, write_endpoints
from processes.scripted_engine import ScriptedEngine
from stageline_api.endpoints import GroupEndpoint
from stageline_api.telemetry.timeline import TimelineMark
from stageline_gateway.endpoints import pipeline_watch
from stageline_gateway.endpoints.pipeline_watch import COLUMNS, REREAD_SECONDS, StageMarks, lane, picture
from stageline_gateway.settings import GatewaySettings

STATES = ["busy.decode", "busy.dummy", "wait.recv", "wait.host", "idle"]
TIMES = st.lists(st.tuples(st.sampled_from(STATES), st.integers(1, 10**9)), min_size=1, max_size=40)


@given(times=TIMES, begin=st.integers(-(10**9), 10**10), length=st.integers(COLUMNS, 10**10), offset=st.integers(-5, 5))
def test_every_nanosecond_is_in_one_column(times: list[tuple[str, int]], begin: int, length: int, offset: int) -> None:
    length -= length % COLUMNS
    edges = list(accumulate((spent for _, spent in times), initial=offset))
    marks = [TimelineMark(state, "", at) for (state, _), at in zip(times, edges, strict=False)]
    drawn = lane(StageMarks(0, marks, edges[-1], offset), begin, begin + length)
    inside = dict.fromkeys(STATES, 0)
    for (state, spent), at in zip(times, edges, strict=False):
        first = max(begin, at - offset)
        inside[state] += max(0, min(begin + length, at - offset + spent) - first)
    assert {state: drawn.by_state[state] for state in STATES} == inside
    assert sum(drawn.busy) == inside["busy.decode"] + inside["busy.dummy"]
    assert sum(drawn.wait) == inside["wait.recv"] + inside["wait.host"]
    assert all(busy + wait <= length // COLUMNS for busy, wait in zip(drawn.busy, drawn.wait, strict=True))


def test_a_bubble_is_waiting_and_dummy_time() -> None:
    second = 10**9
    marks = [TimelineMark("busy.decode", "", 0), TimelineMark("wait.recv", "", second)]
    dummy = [TimelineMark("busy.dummy", "", 0), TimelineMark("idle", "", second)]
    drawn = picture([StageMarks(0, marks, 2 * second, 0), StageMarks(1, dummy, 7 * second, 5 * second)], 2.0)
    assert drawn["bubble_ratio"] == pytest.approx(1 / 2)
    assert drawn["stages"][0]["busy"] == [100] * (COLUMNS // 2) + [0] * (COLUMNS // 2)
    idle = picture([StageMarks(0, [TimelineMark("idle", "", 0)], second, 0)], 1.0)
    assert idle["bubble_ratio"] is None


def page(seq: int, now: int) -> str:
    """A stage's answer: one step, busy half a second, then waiting."""
    marks = [["busy.decode", "", now - 10**9], ["wait.recv", "", now - 10**9 // 2]]
    step = {
        "seq": seq, "cohort": 0, "kind": "decode", "rows": 1, "tokens": 1, "feedback_through": -1,
        "marks": marks, "end_nanoseconds": now,
    }  # fmt: skip
    body: dict[str, Any] = {
        "stage": 0, "stage_count": 1, "incarnation": 7, "oldest_seq": 0, "more": False, "steps": [step],
        "open_marks": [], "now_nanoseconds": now,
    }  # fmt: skip
    return json.dumps(body)


@pytest.fixture
def watched(tmp_path: Path, engine: ScriptedEngine) -> Any:
    stage = {"stage": 0, "health_url": engine.url, "host": "a"}
    stages = {"served_name": MODEL, "stage_count": 1, "incarnation": 7, "stages": [stage]}
    engine.replies |= {
        "GET /stages": (200, json.dumps(stages)),
        "GET /clock": (200, '{"stages": []}'),
        "GET /timeline": (200, page(3, 5 * 10**9)),
        "GET /readyz": (200, "{}"),
    }
    with running_gateway(GatewaySettings(tmp_path / "e.json")) as gateway:
        endpoint = GroupEndpoint(model=MODEL, group=0, incarnation=7, url=engine.url, ready=True)
        write_endpoints(gateway.endpoints, endpoint)
        eventually(lambda: gateway.http.get("/v1/models").json()["data"], "not served")
        yield gateway


def test_many_readers_ask_a_stage_once(watched: RunningGateway, engine: ScriptedEngine) -> None:
    began = time.monotonic()
    answers = [watched.http.get("/pipeline", params={"model": MODEL, "window_seconds": "1"}) for _ in range(5)]
    took_seconds = time.monotonic() - began
    assert [one.status_code for one in answers] == [200] * 5, answers[0].text
    told = answers[0].json()
    assert told["stages"][0]["seconds"] == {"busy.decode": 0.5, "wait.recv": 0.5}
    assert (told["bubble_ratio"], told["incarnation"]) == (0.5, 7)
    asked = [path for path, _ in engine.asked if path.startswith("GET /timeline")]
    assert asked[0] == "GET /timeline?since_seq=-1"
    assert len(asked) <= 1 + took_seconds / REREAD_SECONDS, f"{asked} in {took_seconds} s"  # more where it took longer
    eventually(
        lambda: (
            watched.http.get("/pipeline", params={"model": MODEL}).status_code == 200
            and engine.asked[-1][0] == "GET /timeline?since_seq=3"
        ),
        "it goes on after the last step it has",
    )


def test_a_picture_of_a_quick_pipeline_is_not_drawn_on_the_loop(
    watched: RunningGateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty thousand marks of a stage, looked at through as many windows as there are requests."""
    now, states = 20 * 10**9, ("busy.decode", "wait.recv", "busy.prefill", "wait.host", "idle")
    told = json.loads(page(3, now))
    [step] = told["steps"]
    marks = [[states[at % 5], "", at * now // 50_000] for at in range(50_000)]
    engine.replies["GET /timeline"] = (200, json.dumps(told | {"steps": [step | {"marks": marks}]}))
    drawn_in = list[bool]()

    def drawn(stages: Sequence[StageMarks], window_seconds: float) -> dict[str, Any]:
        drawn_in.append(runs_on_a_loop())
        return picture(stages, window_seconds)

    monkeypatch.setattr(pipeline_watch, "picture", drawn)
    for at in range(4):
        query: dict[str, str | float] = {"model": MODEL, "window_seconds": 9 + at / 40}
        answered = watched.http.get("/pipeline", params=query)
        assert answered.status_code == 200, answered.text
        assert sum(answered.json()["stages"][0]["seconds"].values()) == pytest.approx(9 + at / 40, abs=1e-3)
    assert drawn_in == [False] * 4


def runs_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ({"model": "absent"}, 404, "model"),
        ({}, 404, "model"),
        ({"model": MODEL, "group": "9"}, 400, "group"),
        ({"model": MODEL, "window_seconds": "11"}, 400, "window_seconds"),
        ({"model": MODEL, "window_seconds": "nan"}, 400, "window_seconds"),
        ({"model": MODEL, "window_seconds": "x"}, 400, "window_seconds"),
    ],
    ids=str,
)
def test_a_bad_query_is_named(watched: RunningGateway, query: dict[str, str], status: int, param: str) -> None:
    answered = watched.http.get("/pipeline", params=query)
    assert (answered.status_code, answered.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("asked", "reply", "words"),
    [
        ("GET /stages", (200, "{}"), "can't be read"),
        ("GET /timeline", (500, "broken"), "can't be read"),
        (
            "GET /stages",
            (200, json.dumps({"served_name": MODEL, "stage_count": 2, "incarnation": 7, "stages": []})),
            "not all connected",
        ),
    ],
)
def test_what_can_not_be_drawn_says_why(
    watched: RunningGateway, engine: ScriptedEngine, asked: str, reply: tuple[int, str], words: str
) -> None:
    engine.replies[asked] = reply
    answered = watched.http.get("/pipeline", params={"model": MODEL})
    assert (answered.status_code, answered.headers["retry-after"]) == (503, "2")
    assert words in answered.json()["error"]["message"]


def test_the_page_is_held_to_itself(watched: RunningGateway) -> None:
    sizes = 0
    for path in ("/", "/page.css", "/page.js"):
        answered = watched.http.get(path)
        assert answered.status_code == 200
        assert "default-src 'none'" in answered.headers["content-security-policy"]
        assert answered.headers["x-content-type-options"] == "nosniff"
        assert "http" not in answered.text.replace("https://", "http://").split("http-equiv")[0].replace(path, "")
        sizes += len(answered.content)
    assert sizes < 60_000
