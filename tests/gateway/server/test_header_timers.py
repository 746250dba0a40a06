"""How long a connection waits for a request's headers: by a clock of the test's own, over uvicorn's protocol."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from uvicorn.server import ServerState

from stageline_gateway.server.http_protocol import HEADER_TIMEOUT_SECONDS, BoundedConfig, GatewayProtocol

REQUEST = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"


class Written(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.content = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.content += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Clock:
    """A loop whose timers fire when the test says so; its tasks never run."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *args: Any) -> SimpleNamespace:
        timer = (when, call, args)
        self.timers.append(timer)
        return SimpleNamespace(when=lambda: when, cancel=lambda: self.timers.remove(timer))

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> SimpleNamespace:
        return self.call_at(self.now + seconds, call, *args)

    def create_task(self, work: Any, **_: Any) -> asyncio.Future[None]:
        work.close()
        return asyncio.Future(loop=cast(Any, self))

    def get_debug(self) -> bool:
        return False

    def pass_by(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= end]:
            timer = min(due, key=lambda one: one[0])
            self.timers.remove(timer)
            self.now = max(self.now, timer[0])
            timer[1](*timer[2])
        self.now = end


class Connected:
    def __init__(self) -> None:
        self.clock, self.written = Clock(), Written()
        config = BoundedConfig(cast(Any, None), log_config=None, http=GatewayProtocol, lifespan="off")
        self.protocol = GatewayProtocol(config, ServerState(), {}, cast(Any, self.clock))
        self.protocol.connection_made(self.written)

    def answer(self) -> None:
        """What is said when an answer has been sent."""
        assert self.protocol.cycle is not None
        self.protocol.cycle.response_complete = True
        self.protocol.on_response_complete()

    @property
    def is_refused(self) -> bool:
        return b" 408 " in self.written.content


@pytest.fixture
def connected() -> Connected:
    return Connected()


def test_a_connection_that_says_nothing_is_refused_in_its_time(connected: Connected) -> None:
    connected.clock.pass_by(HEADER_TIMEOUT_SECONDS - 0.1)
    assert not connected.is_refused
    connected.clock.pass_by(0.2)
    assert connected.is_refused
    assert connected.written.is_closed


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_has_all_of_its_time_from_its_first_byte(connected: Connected, is_first: bool) -> None:
    if not is_first:
        connected.protocol.data_received(REQUEST)
        connected.answer()
    connected.clock.pass_by(0.9 * HEADER_TIMEOUT_SECONDS)
    connected.protocol.data_received(REQUEST[:9])
    connected.clock.pass_by(0.9 * HEADER_TIMEOUT_SECONDS)
    assert not connected.is_refused
    connected.clock.pass_by(0.2 * HEADER_TIMEOUT_SECONDS)
    assert connected.is_refused


def test_who_waits_for_an_answer_or_asks_nothing_behind_one_is_not_refused(connected: Connected) -> None:
    connected.protocol.data_received(REQUEST)
    connected.clock.pass_by(3 * HEADER_TIMEOUT_SECONDS)
    assert not connected.is_refused
    assert not connected.clock.timers, "nothing is awaited"
    connected.answer()
    connected.clock.pass_by(3 * HEADER_TIMEOUT_SECONDS)
    assert not connected.is_refused
    connected.protocol.data_received(REQUEST)
    assert not connected.is_refused


def test_a_connection_that_is_gone_leaves_no_timer(connected: Connected) -> None:
    connected.protocol.data_received(REQUEST)
    connected.protocol.connection_lost(None)
    assert not connected.clock.timers
