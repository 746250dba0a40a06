"""A stage that a test plays itself: what it says to a real engine, and what it hears."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast, get_type_hints

import msgspec

from processes.running_group import RunningGroup
from stageline_api import ports
from stageline_runtime.plan_bus.bus import FrameReader, encode_frame
from stageline_runtime.plan_bus.challenge import proof_of
from stageline_runtime.plan_bus.messages import PROTOCOL_VERSION, Challenge, Hello, Place, ToEngine, ToStage


def hello(**changes: object) -> Hello:
    """Of stage 0 of two, with 8 GiB of memory; without a proof yet."""
    known = {
        "protocol": PROTOCOL_VERSION,
        "stage": 0,
        "stage_count": 2,
        "incarnation": 1,
        "proof": "",
        "available_bytes": 1 << 33,
    }
    # What else a stage tells about itself plays no part in who gets in.
    others = {name: "" for name, kind in get_type_hints(Hello).items() if name not in known and kind is str}
    return cast(Hello, cast(Any, Hello)(**(known | others | changes)))


def proven(message: ToEngine, token: str, nonce: str) -> ToEngine:
    """A hello with the proof that fits it; anything else as it is."""
    if not isinstance(message, Hello) or message.proof:
        return message
    proof = proof_of(token, nonce, Place(message.stage, message.rank), message.incarnation)
    return msgspec.structs.replace(message, proof=proof)


@contextmanager
def challenged(group: RunningGroup) -> Iterator[tuple[socket.socket, str]]:
    """A new connection, and what the engine challenges it with."""
    with socket.create_connection((group.addresses[0], ports.PLAN_BUS), timeout=60) as connection:
        reader: FrameReader[ToStage] = FrameReader(ToStage)
        greeted: list[ToStage] = []
        while not greeted:
            data = connection.recv(4096)
            assert data, "it hung up"
            greeted = reader.feed(data)
        [challenge] = greeted
        assert isinstance(challenge, Challenge)
        yield connection, challenge.nonce


def heard(connection: socket.socket) -> list[ToStage]:
    """All that comes until the other side hangs up."""
    reader: FrameReader[ToStage] = FrameReader(ToStage)
    answers: list[ToStage] = []
    with suppress(ConnectionResetError):  # the rest of what was sent was not read
        while data := connection.recv(4096):
            answers += reader.feed(data)
    return answers


class PlayedStage:
    """A connection whose handshake is done; says and hears one message at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader: FrameReader[ToStage] = FrameReader(ToStage)
        self._heard: list[ToStage] = []

    def say(self, message: ToEngine) -> None:
        self._connection.sendall(encode_frame(message))

    def hear(self) -> ToStage:
        """The next message; an AssertionError when the engine hangs up."""
        while not self._heard:
            data = self._connection.recv(4096)
            assert data, "it hung up"
            self._heard = self._reader.feed(data)
        return self._heard.pop(0)


@contextmanager
def played_stage(group: RunningGroup, said: Hello) -> Iterator[PlayedStage]:
    """A stage that has said hello."""
    with challenged(group) as (connection, nonce):
        stage = PlayedStage(connection)
        stage.say(proven(said, group.token, nonce))
        yield stage
