"""Only this group's stages get in, each once; everyone else is told why, and no secret is ever logged."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec
import pytest

from oracles.tiny_models import write_tiny_llama
from processes.running_group import RunningGroup, running_group
from stageline_api import ports
from stageline_runtime.plan_bus.bus import FrameReader, encode_frame
from stageline_runtime.plan_bus.messages import (
    PROTOCOL_VERSION,
    Hello,
    Loaded,
    Refused,
    StepDone,
    ToEngine,
    ToStage,
)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    """An engine of two stages that waits for both; the tests play stage 0."""
    directory = tmp_path_factory.mktemp("handshake")
    model_dir = write_tiny_llama(directory / "model")
    held_back = frozenset({"stage-0", "stage-1"})
    with running_group(directory / "group", model_dir, 2, start=False, held_back=held_back) as group:
        group.wait_until(lambda: group.engine_status().get("phase") == "Connecting", "the engine listens")
        yield group


def hello(group: RunningGroup) -> Hello:
    known = {
        "protocol": PROTOCOL_VERSION,
        "stage": 0,
        "stage_count": 2,
        "incarnation": 1,
        "token": group.token,
        "available_bytes": 1 << 33,
    }
    # What else a stage tells about itself plays no part in who gets in.
    others = {name: "" for name, kind in get_type_hints(Hello).items() if name not in known and kind is str}
    return cast(Hello, cast(Any, Hello)(**known, **others))


def say(group: RunningGroup, *messages: ToEngine) -> list[ToStage]:
    """Say something on a new connection; what the engine answers until it hangs up."""
    with socket.create_connection((group.addresses[0], ports.PLAN_BUS), timeout=60) as connection:
        connection.sendall(b"".join(map(encode_frame, messages)))
        reader: FrameReader[ToStage] = FrameReader(ToStage)
        answers: list[ToStage] = []
        while data := connection.recv(4096):
            answers += reader.feed(data)
        return answers


Change = dict[str, Any]
REFUSALS: list[tuple[str, Change, str]] = [
    ("token", {"token": "stolen-or-guessed"}, "the plan bus token is wrong"),
    ("empty token", {"token": ""}, "the plan bus token is wrong"),
    ("protocol", {"protocol": 99}, "protocol version 99 does not match"),
    (
        "older incarnation",
        {"incarnation": 0},
        "incarnation 0 is not this group's 1",
    ),
    (
        "newer incarnation",
        {"incarnation": 2},
        "incarnation 2 is not this group's 1",
    ),
    ("stage", {"stage": 2}, "stage 2 of 2 has no place among 2"),
    ("negative stage", {"stage": -1}, "stage -1 of 2 has no place among 2"),
    ("stage count", {"stage_count": 3}, "stage 0 of 3 has no place among 2"),
]


@pytest.mark.parametrize(("change", "sentence"), [case[1:] for case in REFUSALS], ids=[what for what, _, _ in REFUSALS])
def test_a_hello_that_does_not_belong_here_is_refused(group: RunningGroup, change: Change, sentence: str) -> None:
    answers = say(group, msgspec.structs.replace(hello(group), **change))
    assert len(answers) == 1
    assert isinstance(answers[0], Refused)
    assert sentence in answers[0].detail
    assert group.engine_status()["stages_connected"] == 0


@pytest.mark.parametrize("message", [Loaded(0, 1), StepDone(0, ())], ids=["Loaded", "StepDone"])
def test_who_has_not_said_hello_is_not_heard(group: RunningGroup, message: ToEngine) -> None:
    assert say(group, message) == []
    assert group.engine_status()["stages_ready"] == 0


def test_a_stage_gets_in_once(group: RunningGroup) -> None:
    """Runs last but one: its connection ends the group, as a lost stage must."""
    with socket.create_connection((group.addresses[0], ports.PLAN_BUS), timeout=60) as connection:
        connection.sendall(encode_frame(hello(group)))
        group.wait_until(lambda: group.engine_status()["stages_connected"] == 1, "the handshake")
        answers = say(group, hello(group))
        assert answers == [Refused("stage 0 is connected already")]
        assert group.engine_status()["stages_connected"] == 1
    assert group.wait_ended("engine") == 71, group.account()
    assert group.last_words("engine")["peer"] == 0


def test_no_token_is_logged(group: RunningGroup) -> None:
    group.processes["engine"].wait(timeout=120)
    log = group.log("engine") + (group.directory / "engine.termination").read_text()
    assert "refused a stage: the plan bus token is wrong" in log
    assert group.token not in log
    assert "stolen-or-guessed" not in log
    assert "Traceback" not in log


def test_the_harness_wrote_the_token_nowhere_else(group: RunningGroup) -> None:
    """The token travels by environment alone: no file of the group holds it."""
    for path in Path(group.directory).rglob("*"):
        if path.is_file():
            assert group.token.encode() not in path.read_bytes(), path
