"""Only this group's stages get in, each once; everyone else is told why, and no secret is ever logged."""

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import pytest

from oracles.tiny_models import write_tiny_llama
from processes.played_stage import challenged, heard, hello, proven
from processes.process_costs import first_thread_seconds, most_resident_bytes
from processes.running_group import RunningGroup, running_group
from stageline_api import ports
from stageline_runtime.plan_bus.bus import MAX_FRAME_BYTES, encode_frame
from stageline_runtime.plan_bus.challenge import MOST_STRANGERS, proof_of
from stageline_runtime.plan_bus.messages import (
    Loaded,
    Place,
    Refused,
    StepDone,
    ToEngine,
    ToStage,
)

STRANGERS_SECONDS: Final = 0.25
"""Of CPU, that the engine's loop may be kept by them."""


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    """An engine of two stages that waits for both; the tests play stage 0."""
    directory = tmp_path_factory.mktemp("handshake")
    model_dir = write_tiny_llama(directory / "model")
    held_back = frozenset({"stage-0", "stage-1"})
    with running_group(directory / "group", model_dir, 2, start=False, held_back=held_back) as group:
        group.wait_until(lambda: group.engine_status().get("phase") == "Connecting", "the engine listens")
        yield group


def say(group: RunningGroup, *messages: ToEngine, token: str | None = None) -> list[ToStage]:
    """Say something on a new connection; what the engine answers, after its challenge, until it hangs up."""
    with challenged(group) as (connection, nonce):
        said = [proven(message, group.token if token is None else token, nonce) for message in messages]
        connection.sendall(b"".join(map(encode_frame, said)))
        return heard(connection)


Change = dict[str, Any]
REFUSALS: list[tuple[str, Change, str]] = [
    ("proof", {"proof": "0" * 64}, "the plan bus token is wrong"),
    ("token instead of a proof", {"proof": "stolen-or-guessed"}, "the plan bus token is wrong"),
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
    answers = say(group, msgspec.structs.replace(hello(), **change))
    assert len(answers) == 1
    assert isinstance(answers[0], Refused)
    assert sentence in answers[0].detail
    assert group.engine_status()["stages_connected"] == 0


@pytest.mark.parametrize("token", ["stolen-or-guessed", ""])
def test_a_proof_of_another_token_is_refused(group: RunningGroup, token: str) -> None:
    assert say(group, hello(), token=token) == [Refused("the plan bus token is wrong")]


def test_what_was_heard_on_one_connection_opens_no_other(group: RunningGroup) -> None:
    """Nor does it for another stage or another life of the group."""
    with challenged(group) as (_, nonce):
        proof = proof_of(group.token, nonce, Place(0), 1)
        refused = say(group, msgspec.structs.replace(hello(), proof=proof))
        assert refused == [Refused("the plan bus token is wrong")]
    for other in ({"stage": 1}, {"incarnation": 2}):
        with challenged(group) as (connection, nonce):
            proof = proof_of(group.token, nonce, Place(0), 1)
            connection.sendall(encode_frame(msgspec.structs.replace(hello(), proof=proof, **cast(Any, other))))
            assert heard(connection) == [Refused("the plan bus token is wrong")]
    assert group.engine_status()["stages_connected"] == 0


def test_strangers_are_not_heard_at_length(group: RunningGroup) -> None:
    """Eight connections at once that announce the longest frame of the protocol, and send it but for its last byte."""
    engine = group.processes["engine"].pid
    before_bytes, before = most_resident_bytes(engine), first_thread_seconds(engine)
    frame = struct.pack("<I", MAX_FRAME_BYTES) + bytes(MAX_FRAME_BYTES - 1)
    with ExitStack() as stack:
        strangers = [stack.enter_context(challenged(group))[0] for _ in range(8)]
        for connection in strangers:
            with suppress(OSError):
                connection.sendall(frame)
        assert [heard(connection) for connection in strangers] == [[]] * 8
    grown, spent = most_resident_bytes(engine) - before_bytes, first_thread_seconds(engine) - before
    assert grown < MAX_FRAME_BYTES // 2, f"the engine grew by {grown} bytes"
    assert spent < STRANGERS_SECONDS, f"{spent:.3f} s of the engine's loop"


def test_strangers_are_few_and_leave_room_for_a_stage_when_they_leave(group: RunningGroup) -> None:
    with ExitStack() as stack:
        for _ in range(MOST_STRANGERS):
            stack.enter_context(challenged(group))
        with socket.create_connection((group.addresses[0], ports.PLAN_BUS), timeout=60) as one_more:
            assert heard(one_more) == []
    assert say(group, Loaded(0, 1)) == []


@pytest.mark.parametrize("message", [Loaded(0, 1), StepDone(0, ())], ids=["Loaded", "StepDone"])
def test_who_has_not_said_hello_is_not_heard(group: RunningGroup, message: ToEngine) -> None:
    assert say(group, message) == []
    assert group.engine_status()["stages_ready"] == 0


def test_a_stage_gets_in_once(group: RunningGroup) -> None:
    """Runs last but one: its connection ends the group, as a lost stage must."""
    with challenged(group) as (connection, nonce):
        connection.sendall(encode_frame(proven(hello(), group.token, nonce)))
        group.wait_until(lambda: group.engine_status()["stages_connected"] == 1, "the handshake")
        answers = say(group, hello())
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
